"""Quantized values and scales, bit for bit against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from jax_te.quantize import (
    BlockQuantizer,
    MXQuantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    TensorQuantizer,
    observe_quantization,
    quantization_statistics,
    quantize,
    quantizer_for,
)
from jax_te.recipe import NVFP4BlockScaling
from tests.support import oracles
from tests.support.numerics import assert_bitwise, draw
from tests.support.oracles import E4M3, E5M2, F32

DTYPES = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}
HIGH = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _quantize(dtype, scaling, jit):
    quantizer = TensorQuantizer(dtype=DTYPES[dtype], scaling=scaling)

    def fn(x, scale):
        return quantize(x, quantizer, scale)

    return jax.jit(fn) if jit else fn


JITTED = {(dtype, scaling): _quantize(dtype, scaling, True) for dtype in DTYPES for scaling in ("given", "current")}


def check(x, dtype, *, scale=None, jit=True):
    """``scale`` None: current scaling."""
    scaling = "current" if scale is None else "given"
    fn = JITTED[dtype, scaling] if jit else _quantize(dtype, scaling, False)
    q, seen = fn(jnp.asarray(x), None if scale is None else jnp.float32(scale))
    expected_amax = oracles.amax(x)
    expected_scale = oracles.scale_from_amax(expected_amax, dtype) if scale is None else F32(scale)
    assert_bitwise(F32(oracles.flush(seen)), F32(oracles.flush(expected_amax)), what="amax")
    assert_bitwise(q.scale_inv, F32(oracles.flush(F32(1) / expected_scale)), what="scale_inv")
    assert_bitwise(q.data, oracles.quantize(x, dtype, expected_scale), what="data")
    assert q.dtype == x.dtype


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("high", list(HIGH))
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_random_values_over_many_magnitudes(dtype, high, jit):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 48)) * np.exp2(rng.uniform(-20, 6, (64, 48)))).astype(HIGH[high])
    for scale in (None, 1.0, 0.37, 300.0, 2.0**20):
        check(x, dtype, scale=scale, jit=jit)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_and_every_tie(dtype, jit):
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    ties = (values[1:] + values[:-1]) / 2
    x = F32(np.concatenate([values, ties, np.nextafter(F32(ties), F32(9e9)), np.nextafter(F32(ties), F32(-9e9))]))
    check(x.reshape(1, -1), dtype, scale=1.0, jit=jit)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("high", list(HIGH))
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    "values",
    {
        "zeros": [0.0, -0.0, 0.0, 0.0],
        "saturates": [448.0, 449.0, 500.0, -6e4, 464.0, -464.0],
        "inf": [np.inf, -np.inf, 1.0, -2.0],
        "nan": [np.nan, 1.0, -2.0, 0.0],
        "fp8 subnormals": [2.0**-9, 2.0**-10, 2.0**-11, 3 * 2.0**-10, 2.0**-16, 2.0**-17, -(2.0**-18)],
        "tiny": [1e-37, -3e-38, 0.0, 2e-38],
        "below fp32's normal numbers": [1e-39, -1e-40, 1e-38, 0.0],
        "huge": [3e38, -1e38, 1.0, 1e-3],
    }.items(),
    ids=lambda item: item[0],
)
def test_special_values(dtype, high, values, jit):
    with np.errstate(over="ignore"):
        x = np.resize(values[1], (2, 8)).astype(HIGH[high])
    for scale in (None, 1.0, 7.5):
        check(x, dtype, scale=scale, jit=jit)


def test_what_special_values_become():
    with_inf = jnp.array([[jnp.inf, -500.0, 1.0]])
    q, seen = quantize(with_inf, TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="current"))
    assert jnp.isnan(q.values()).all(), "inf has no scale of its own"
    assert jnp.isinf(seen)
    q, seen = quantize(with_inf, TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="given"), jnp.float32(1.0))
    assert q.data.astype(jnp.float32).tolist() == [[448.0, -448.0, 1.0]]
    assert jnp.isinf(seen)
    q, seen = quantize(jnp.zeros((2, 2)), TensorQuantizer(dtype=jnp.float8_e5m2, scaling="current"))
    assert (float(q.scale_inv), float(seen)) == (1.0, 0.0)


@settings(max_examples=40, deadline=None)
@given(
    st_numpy.arrays(np.float32, (2, 8), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    st.sampled_from(list(HIGH)),
    st.sampled_from([E4M3, E5M2]),
    st.one_of(st.none(), st.floats(2.0**-40, 2.0**40, width=32)),
)
def test_any_values(x, high, dtype, scale):
    with np.errstate(over="ignore", invalid="ignore"):
        check(x.astype(HIGH[high]), dtype, scale=scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("high", list(HIGH))
def test_dequantize_multiplies_in_fp32_and_rounds_once(dtype, high):
    q, _ = quantize(draw("x", (16, 24), high), TensorQuantizer(dtype=DTYPES[dtype], scaling="current"))
    expected = (np.asarray(q.data).astype(F32) * np.asarray(q.scale_inv)).astype(HIGH[high])
    assert_bitwise(q.dequantize(), expected)
    assert (q.shape, q.ndim) == ((16, 24), 2)
    half_step = {E4M3: 2.0**-4, E5M2: 2.0**-3}[dtype]
    x = draw("x", (16, 24), high).astype(jnp.float32)
    floor = np.max(np.abs(x)) * {E4M3: 2.0**-18, E5M2: 2.0**-31}[dtype]  # below the smallest subnormal's half
    error = np.abs(np.asarray(q.dequantize().astype(jnp.float32)) - x)
    assert (error <= half_step * 1.1 * np.abs(x) + 2 * floor).all()


def test_quantized_tensor_is_a_pytree_and_keeps_its_dtype_static():
    q = QuantizedTensor(data=jnp.ones((4, 4), jnp.float8_e4m3fn), scale_inv=jnp.float32(0.5), dtype=jnp.bfloat16)
    leaves, treedef = jax.tree.flatten(q)
    assert len(leaves) == 2
    assert jax.tree.unflatten(treedef, leaves).dtype == jnp.bfloat16
    assert jax.jit(lambda q: q.dequantize())(q).dtype == jnp.bfloat16


def test_quantizers_are_hashable():
    one, two = (TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="current") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)


GIVEN = TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="given")
COMPUTED = {
    "current": TensorQuantizer(dtype=jnp.float8_e4m3fn),
    "block": BlockQuantizer(dtype=jnp.float8_e4m3fn),
    "mxfp8": MXQuantizer(dtype=jnp.float8_e4m3fn),
    "nvfp4": NVFP4Quantizer(),
}


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "scaling='given' needs a scale; give one"),
        (jnp.ones((4, 4)), r"scale must be float32 \[\], or \[d\] .* got float32\[4, 4\]"),
        (jnp.ones((), jnp.bfloat16), r"scale must be float32 .* got bfloat16\[\]"),
        (jnp.ones(3), "does not divide into the 3 parts"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(scale, message):
    for call in (quantize, lambda x, quantizer, scale: quantizer.quantize(x, scale, axis=1, columnwise=False)):
        with pytest.raises(ValueError, match=message):
            call(jnp.ones((4, 4)), GIVEN, scale)


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("scale", [jnp.float32(2.0), jnp.ones(2)], ids=["[]", "[d]"])
def test_a_quantizer_that_computes_its_scale_takes_none(kind, scale):
    with pytest.raises(ValueError, match="computes scales from the tensor, and takes none; leave scale out"):
        quantize(jnp.ones((32, 32)), COMPUTED[kind], scale)


@pytest.mark.parametrize("kind", ["given", *COMPUTED])
@pytest.mark.parametrize("dtype", [jnp.int16, jnp.float8_e5m2, bool])
def test_arrays_of_other_dtypes_are_refused(kind, dtype):
    scale = jnp.float32(1.0) if kind == "given" else None
    with pytest.raises(TypeError, match="takes arrays of float32, bfloat16, float16"):
        quantize(jnp.ones((32, 32), dtype), COMPUTED.get(kind, GIVEN), scale)


def test_a_quantizer_of_ones_own_is_observed_under_its_dtypes_name():
    class Own(Quantizer):
        def quantize(self, x, scale, *, axis, columnwise):
            return QuantizedTensor(data=x.astype(self.dtype), scale_inv=jnp.float32(1.0), dtype=x.dtype), None

    quantizer = Own(dtype=jnp.float8_e4m3b11fnuz)
    with observe_quantization() as observer:
        observer.record("a", "x", quantizer, quantization_statistics(jnp.ones((2, 2)), quantizer))
    assert observer.formats == {("a", "x"): "float8_e4m3b11fnuz"}


@pytest.mark.costly
def test_a_block_whose_nvfp4_scale_rounds_to_zero_does_not_count_in_the_statistics():
    quantizer = quantizer_for(NVFP4BlockScaling(), "x")
    x = jnp.concatenate([jnp.ones((1, 16)), jnp.full((1, 16), 1e-7)], axis=1)
    found = quantization_statistics(x, quantizer)
    assert 0.0 < float(found["scale"]) < 1e6
    assert float(found["underflow"]) == 0.5
