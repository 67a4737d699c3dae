"""Our quantizers against Transformer Engine's quantizer objects, bit for bit."""

import jax
import jax.numpy as jnp
import pytest
import transformer_engine.jax.quantize as te
from transformer_engine.jax.quantize.helper import AmaxComputeAlgo

from jax_te.ops.te import kernels
from jax_te.ops.te.quantizer import inside_te
from jax_te.quantize import Quantization, TensorQuantizer, quantize
from jax_te.quantize.scaling import amax_rule_of, next_amax_state, scale_in_use
from jax_te.recipe import DelayedScaling
from tests.support.numerics import assert_bitwise, draw

pytestmark = pytest.mark.te

DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]
MODES = {"current": te.ScalingMode.CURRENT_TENSOR_SCALING, "given": te.ScalingMode.DELAYED_TENSOR_SCALING}
INPUTS = {
    "normal": lambda: draw("x", (32, 48)),
    "wide": lambda: draw("x", (32, 48)) * jnp.exp2(draw("exponent", (32, 48)) * 8.0),
    "saturating": lambda: draw("x", (32, 48)) * 1e5,
    "zeros": lambda: jnp.zeros((32, 48)),
    "inf": lambda: draw("x", (32, 48)).at[3, 4].set(jnp.inf),
    "nan": lambda: draw("x", (32, 48)).at[3, 4].set(jnp.nan),
}


def theirs(scaling, dtype, **state):
    return te.QuantizerFactory.create(1, MODES[scaling], dtype, te.QuantizeLayout.ROWWISE_COLWISE, **state)


@pytest.mark.parametrize("values", list(INPUTS))
@pytest.mark.parametrize("high", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("jit", [False, True])
def test_values_and_scales(values, high, dtype, jit):
    x = INPUTS[values]().astype(high)
    for scaling, scale in (("current", None), ("given", 1.0), ("given", 37.5)):
        state = {} if scale is None else {"scale": jnp.float32([scale]), "amax_history": jnp.zeros(2)}

        def their_quantize(x, scaling=scaling, state=state):
            with inside_te():
                return theirs(scaling, dtype, **state).quantize(x)

        def our_quantize(x, scaling=scaling, scale=scale):
            return quantize(
                x, TensorQuantizer(dtype=dtype, scaling=scaling), None if scale is None else jnp.float32(scale)
            )

        expected = (jax.jit(their_quantize) if jit else their_quantize)(x)
        q, _ = (jax.jit(our_quantize) if jit else our_quantize)(x)
        rowwise, colwise = expected.rowwise_tensor, expected.colwise_tensor
        if scaling == "current" and not jnp.isfinite(x).all():
            assert rowwise.scale_inv == 1.0
            assert jnp.isnan(q.values()).all(), "ours shows what TE's scale would hide"
            continue
        assert_bitwise(q.data, rowwise.data, what=f"{scaling} {scale}")
        assert_bitwise(q.data.T, colwise.data)
        assert_bitwise(q.scale_inv.reshape(1), rowwise.scale_inv)
        assert rowwise.dq_dtype == q.dtype
        with inside_te():
            assert_bitwise(q.dequantize(), rowwise.dequantize())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_delayed_scaling_over_steps(algorithm, length, dtype):
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=1)
    algo = {"max": AmaxComputeAlgo.MAX, "most_recent": AmaxComputeAlgo.MOST_RECENT}[algorithm]
    their_state = {"scale": jnp.ones((1,)), "amax_history": jnp.zeros((length,))}
    our_state = {"scale": jnp.ones(()), "amax_history": jnp.zeros((length,))}
    for factor in (1.0, 8.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1e-3, 2.0, 2.0, 2.0, 4.0):
        x = draw("x", (16, 16)) * factor
        quantizer = theirs("given", dtype, margin=1.0, amax_compute_algo=algo, **their_state)
        with inside_te():
            expected = quantizer.quantize(x)
        scale = scale_in_use(our_state, dtype, amax_rule_of(recipe))
        q, seen = quantize(x, TensorQuantizer(dtype=dtype, scaling="given"), scale)
        our_state = next_amax_state(our_state, scale, seen)
        their_state = {"scale": quantizer.scale, "amax_history": quantizer.amax_history}
        assert_bitwise(q.scale_inv.reshape(1), expected.rowwise_tensor.scale_inv, what=f"x * {factor}")
        assert_bitwise(q.data, expected.rowwise_tensor.data, what=f"x * {factor}")
        assert_bitwise(
            scale_in_use(our_state, dtype, amax_rule_of(recipe)).reshape(1), quantizer.scale, what=f"after x * {factor}"
        )
        # Theirs: slot 0 empty, newest last. Ours: newest first.
        assert_bitwise(our_state["amax_history"][: length - 1][::-1], quantizer.amax_history[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_amax_that_the_backend_reads_out_of_te(dtype):
    """`seen_amax` knows in which slot TE leaves it."""
    for name, make in INPUTS.items():
        x = make()
        delayed = Quantization(TensorQuantizer(dtype=dtype, scaling="given"), jnp.float32(2.0))
        _, seen = kernels.quantize_operand(x, delayed, axis=-1)
        assert_bitwise(seen, jnp.max(jnp.abs(x)), what=name)
        current = Quantization(TensorQuantizer(dtype=dtype, scaling="current"))
        operand, none = kernels.quantize_operand(x, current, axis=-1)
        assert none is None
        assert operand.rowwise_tensor.data.dtype == dtype


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("values", ["inf", "nan"])
def test_the_backend_shows_what_tes_current_scale_would_hide(values, bias):
    how = Quantization(TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="current"))
    x = INPUTS[values]()
    if bias:
        operand, _, _ = kernels.quantize_dbias(x, how, axis=1, bias_dtype=jnp.float32)
    else:
        operand, _ = kernels.quantize_operand(x, how, axis=-1)
    with inside_te():
        assert jnp.isnan(operand.rowwise_tensor.dequantize()).all()
        assert jnp.isnan(operand.colwise_tensor.dequantize()).all()


def test_the_backends_operands_are_ours():
    x = draw("x", (2, 16, 32))
    for quantizer, scale in (
        (TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="current"), None),
        (TensorQuantizer(dtype=jnp.float8_e5m2, scaling="given"), jnp.float32(50.0)),
    ):
        theirs, _ = kernels.quantize_operand(x, Quantization(quantizer, scale), axis=-1)
        ours, _ = quantize(x, quantizer, scale)
        assert_bitwise(theirs.rowwise_tensor.data, ours.data)
        assert_bitwise(theirs.rowwise_tensor.scale_inv, ours.scale_inv.reshape(1))
