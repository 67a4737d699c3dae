import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import NormSpec
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from tests.support import oracles
from tests.support.calls import layernorm_dense
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, assert_same_rounding, draw, value_and_vjp

NAMES = ("x", "scale", "ln_bias", "kernel", "bias")
SPECS = {
    "layernorm": (NormSpec(), {}),
    "rmsnorm": (NormSpec(kind="rmsnorm"), {"kind": "rmsnorm"}),
    "zero centred": (NormSpec(zero_centered_gamma=True), {"zero_centered": True}),
}


def inputs(dtype, kind="layernorm", out=(3, 16)):
    x, g = draw("x", (2, 16, 32), dtype, shift=0.3), draw("g", (2, 16, *out), dtype, scale=0.1)
    scale, ln_bias = draw("scale", (32,), scale=0.3, shift=1.0), draw("ln_bias", (32,), scale=0.3)
    kernel, bias = draw("kernel", (32, *out), scale=0.2), draw("bias", out)
    return (x, scale, ln_bias if kind == "layernorm" else None, kernel, bias), g


def compare(y, gradients, expected, check, dtype):
    check(y, expected["y"], 2 * TOLERANCE[dtype], what="y")
    for name, gradient in zip(NAMES, gradients, strict=False):
        if gradient is None:
            assert name == "ln_bias"
            continue
        # Everything but the bias gradient has passed one more tensor in the compute dtype: the norm's output or its
        # gradient.
        summed = (
            check is assert_same_rounding and gradient.ndim == 1
        )  # holds a bit of every row that a flipped rounding changed
        check(gradient, expected[name], 1e-3 if summed else 2 * TOLERANCE[dtype], what=f"d{name}")
        assert gradient.dtype == (y.dtype if name == "x" else jnp.float32)


@pytest.mark.wide
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_recipe(name, dtype):
    norm, spec = SPECS[name]
    args, g = inputs(dtype, norm.kind)
    y, gradients = value_and_vjp(lambda *a: layernorm_dense(*a, norm=norm, backend="xla"), args, g)
    assert y.dtype == jnp.dtype(dtype)
    rounded = (*args[:3], args[3].astype(dtype), args[4].astype(dtype))
    compare(y, gradients, oracles.norm_dense_layer(oracles.Unquantized(), *rounded, g, **spec), assert_close, dtype)


@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_fp8(recipe, name):
    norm, spec = SPECS[name]
    args, g = inputs(jnp.float32, norm.kind)
    if recipe == "current":
        chosen, state, oracle = Float8CurrentScaling(), None, oracles.Scales()
    else:
        chosen, scales = DelayedScaling(amax_history_len=2), {"x": 100.0, "kernel": 300.0, "grad": 4000.0}
        state = init_gemm_state(chosen)
        state = {
            role: {**state[role], "scale": jnp.float32(scales[role])} for role in ROLES
        }  # no amax yet: the scale in use is kept
        oracle = oracles.Scales(fixed=scales)

    def run(*a):
        return layernorm_dense(*a[:-1], norm=norm, recipe=chosen, state=a[-1], backend="xla")

    y, gradients = value_and_vjp(run, (*args, state), g)
    expected = oracles.norm_dense_layer(oracle, *args, g, **spec)
    compare(y, gradients[:-1], expected, assert_same_rounding, "float32")
    next_state = gradients[-1]
    if recipe == "current":
        assert next_state is None
        return
    for role in ROLES:
        assert_bitwise(next_state[role]["scale"], np.float32(scales[role]), what=role)
        seen = np.asarray(next_state[role]["amax_history"])
        assert seen[1] == 0.0
        if role == "x":  # the norm's output, in fp32 there and fp64 here
            np.testing.assert_allclose(seen[0], oracle.seen[role], rtol=1e-6)
        else:
            assert_bitwise(seen[0], oracle.seen[role], what=role)


def test_fp8_in_bf16_quantizes_the_norms_rounded_output():
    args, g = inputs(jnp.bfloat16)
    y, gradients = value_and_vjp(lambda *a: layernorm_dense(*a, recipe=Float8CurrentScaling(), backend="xla"), args, g)
    x, scale, ln_bias = oracles.wide(*args[:3])
    normed = jnp.asarray(oracles.norm(x, scale, ln_bias), jnp.float32).astype(jnp.bfloat16)
    inner = oracles.dense_layer(oracles.Scales(), normed, args[3], args[4].astype(jnp.bfloat16), g)
    assert_same_rounding(y, inner["y"], 4 * TOLERANCE["bfloat16"])
    assert_same_rounding(gradients[3], inner["kernel"], 4 * TOLERANCE["float32"])


def test_errors():
    args, _ = inputs(jnp.float32)
    with pytest.raises(ValueError, match=r"layernorm_dense: the norm's .* \(32,\), .* got \(\(16,\)"):
        layernorm_dense(args[0], jnp.ones(16), None, args[3])
    with pytest.raises(ValueError, match="layernorm_dense: RMS norm has no bias"):
        layernorm_dense(*args, norm=NormSpec(kind="rmsnorm"))
    with pytest.raises(ValueError, match=r"layernorm_dense: input \(2, 16, 32\) and kernel \(16, 8\)"):
        layernorm_dense(*args[:3], jnp.ones((16, 8)))
    with pytest.raises(
        ValueError, match=r"layernorm_dense under recipe 'current'.* output size 8 must be a multiple of 16"
    ):
        layernorm_dense(*args[:3], jnp.ones((32, 8)), recipe=Float8CurrentScaling())
    with pytest.raises(ValueError, match="prepare_quantization"):
        layernorm_dense(*args, recipe=DelayedScaling())
