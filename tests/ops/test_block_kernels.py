"""The Pallas block kernels in Pallas's GPU interpreter, against NumPy: quantization bit for bit, products in fp32."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops.pallas import block_gemm, block_quantize, block_quantize_2d, supported
from jax_te.quantize import exponent_scale
from tests.support.numerics import assert_bitwise, assert_close, draw, equations, without_type_checker

F32 = np.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
OLD = jax.__version_info__[:2] < (0, 11)
interpreted = pytest.mark.skipif(OLD, reason="JAX before 0.11 has no interpreter for these kernels")
each_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])


def expected_scale(amax, limit, power_of_two):
    """By a division that is rounded exactly, its mantissa cleared for powers of two."""
    with np.errstate(all="ignore"):
        scale = np.minimum(F32(limit) / amax, np.finfo(F32).max)
    if power_of_two:
        scale = (scale.view(np.uint32) & np.uint32(0x7F800000)).view(F32)
    return np.where(np.isfinite(amax), np.where(amax > 0, scale, F32(1)), F32(np.nan))


def expected_blocks(x, dtype, power_of_two, rows, columns):
    """Data and scale_inv of ``x [m, k]`` in blocks of rows x columns."""
    x, limit = np.asarray(x).astype(F32), F32(ml_dtypes.finfo(NUMPY[dtype]).max)
    blocks = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    padded = np.zeros((blocks[0] * rows, blocks[1] * columns), F32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    scale = expected_scale(padded.reshape(blocks[0], rows, blocks[1], columns).max((1, 3)), limit, power_of_two)
    wide = scale.repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]
    return np.clip(x * wide, -limit, limit).astype(NUMPY[dtype]), F32(1) / scale


def expected_quantized(x, dtype, power_of_two):
    """What `block_quantize` returns."""
    turned = np.ascontiguousarray(np.asarray(x).T)
    return *expected_blocks(x, dtype, power_of_two, 1, 128), *expected_blocks(turned, dtype, power_of_two, 1, 128)


def expected_quantized_2d(x, dtype, power_of_two):
    """What `block_quantize_2d` returns."""
    data, scale_inv = expected_blocks(x, dtype, power_of_two, 128, 128)
    return data, np.ascontiguousarray(data.T), scale_inv


def gemm_operands(m, n, k, dtypes=(E4M3, E4M3), forms=("row", "square"), positive=False):
    """Arguments of `block_gemm`: values that fill FP8's range, scales between 1/2 and 2."""
    operands = []
    for name, rows, dtype, form in zip("ab", (m, n), dtypes, forms, strict=True):
        x = draw(name, (rows, k), scale=30.0)
        shape = (rows if form == "row" else -(-rows // 128), -(-k // 128))
        operands += [
            (jnp.abs(x) if positive else x).astype(dtype),
            jnp.exp2(jnp.clip(draw(f"{name} scale", shape), -1, 1)),
        ]
    return operands


def dequantized(x, scale_inv):
    rows = np.asarray(scale_inv, np.float64).repeat(1 if len(scale_inv) == len(x) else 128, 0)[: len(x)]
    return np.asarray(x).astype(np.float64) * rows.repeat(128, 1)[:, : x.shape[1]]


def expected_product(a, a_scale_inv, b, b_scale_inv):
    """In fp64."""
    return dequantized(a, a_scale_inv) @ dequantized(b, b_scale_inv).T


def check_all(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one, other)


def many_scales(shape, dtype=jnp.float32):
    """Normal values whose blocks differ in size: 2^-20 to 2^13."""
    sizes = np.exp2(np.arange(shape[0])[:, None] % 23 - 15 - np.arange(shape[1]) // 128 * 5 + 5).astype(F32)
    return (draw("x", shape) * sizes).astype(dtype)


@pytest.mark.costly("bfloat16-False-E5M2", slow=("float32-True-E4M3",))
@pytest.mark.wide
@interpreted
@each_dtype
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("high", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
def test_quantize(high, power_of_two, dtype):
    x = many_scales((144, 272), high)
    actual = block_quantize(x, dtype, power_of_two=power_of_two, interpret=True)
    check_all(actual, expected_quantized(x, dtype, power_of_two))


@pytest.mark.costly("False-float16-E5M2", slow=("True-float32-E4M3",))
@pytest.mark.wide
@interpreted
@each_dtype
@pytest.mark.parametrize(("power_of_two", "high"), [(True, jnp.float32), (True, jnp.bfloat16), (False, jnp.float16)])
def test_quantize_2d(power_of_two, high, dtype):
    x = many_scales((272, 144), high)
    actual = block_quantize_2d(x, dtype, power_of_two=power_of_two, interpret=True)
    check_all(actual, expected_quantized_2d(x, dtype, power_of_two))


@pytest.mark.costly("False-E4M3", "False-E5M2", slow=("True-E5M2",))
@interpreted
@each_dtype
@pytest.mark.parametrize("power_of_two", [True, False])
def test_quantize_special_values(power_of_two, dtype):
    x = np.array(draw("x", (128, 256)))
    x[:16] = 0.0
    x[16:20, 3], x[20:24, 200] = np.inf, -np.inf
    unit = np.clip(x[127], -1, 1)
    for row, size in enumerate(
        (448.0, 7.0, 57344.0, 3e38, 1e-33)
    ):  # at and just above a step of the power of two; extremes
        x[32 + 2 * row], x[33 + 2 * row] = unit * F32(size), unit * np.nextafter(F32(size), F32(np.inf))
    x = jnp.asarray(x)
    check_all(
        block_quantize(x, dtype, power_of_two=power_of_two, interpret=True), expected_quantized(x, dtype, power_of_two)
    )
    check_all(
        block_quantize_2d(x, dtype, power_of_two=power_of_two, interpret=True),
        expected_quantized_2d(x, dtype, power_of_two),
    )


@interpreted
@each_dtype
def test_nan_stays_nan_and_in_its_blocks(dtype):
    x = draw("x", (128, 256)).at[24, 100].set(jnp.nan)
    rows, _, columns, _ = (np.asarray(part) for part in block_quantize(x, dtype, interpret=True))
    expected_rows, _, expected_columns, _ = expected_quantized(x, dtype, True)
    assert np.isnan(rows.astype(F32)[24, 100])
    assert np.isnan(columns.astype(F32)[100, 24])
    assert_bitwise(np.delete(rows, 24, 0), np.delete(expected_rows, 24, 0))
    assert_bitwise(np.delete(columns, 100, 0), np.delete(expected_columns, 100, 0))


@each_dtype
def test_powers_of_two_are_the_exact_quotients_with_the_mantissa_cleared(dtype):
    limit = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    exact = limit * 2.0 ** np.arange(-110, 100)
    amax = np.concatenate([exact, exact / 1.75, np.exp(np.random.default_rng(0).uniform(-85, 88, 10000))]).astype(F32)
    amax = np.concatenate([amax, np.nextafter(amax, F32(0)), np.nextafter(amax, F32(np.inf))])
    assert_bitwise(exponent_scale(jnp.asarray(amax), dtype), expected_scale(amax, limit, True))


@pytest.mark.costly("(128, 128, 128)-square-row", slow=("(208, 272, 400)-square-square", "(208, 272, 400)-row-row"))
@pytest.mark.wide
@interpreted
@pytest.mark.parametrize(
    "forms", [("row", "square"), ("row", "row"), ("square", "row"), ("square", "square")], ids="-".join
)
@pytest.mark.parametrize("shape", [(128, 128, 128), (208, 272, 400)], ids=str)
def test_gemm(shape, forms):
    operands = gemm_operands(*shape, forms=forms)
    out = block_gemm(*operands, out_dtype=jnp.float32, interpret=True)
    assert_close(out, expected_product(*operands), 2.0**-20)


@pytest.mark.costly(slow=("E4M3 E5M2-float16", "E4M3 E5M2-float32"))
@pytest.mark.wide
@interpreted
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids=["E4M3 E5M2", "E5M2 E4M3"])
def test_gemm_dtypes_and_bias(dtypes, out_dtype):
    operands, bias = gemm_operands(144, 272, 256, dtypes), draw("bias", (272,), jnp.bfloat16, scale=1e4)
    expected = expected_product(*operands) + np.asarray(bias).astype(np.float64)
    if out_dtype == "float16":
        operands[1], bias, expected = operands[1] / 2.0**10, bias / 2**10, expected / 2.0**10
    out = block_gemm(*operands, bias, out_dtype=out_dtype, interpret=True)
    assert out.dtype == out_dtype
    assert_close(out, expected, {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}[out_dtype])


@pytest.mark.costly
@interpreted
def test_quantized_operands_fit_the_gemm():
    x, w = draw("x", (144, 256)), draw("w", (256, 272))
    rows, rows_inv, columns, columns_inv = block_quantize(x, E4M3, interpret=True)
    _, w_turned, w_inv = block_quantize_2d(w, E4M3, interpret=True)
    product = block_gemm(rows, rows_inv, w_turned, w_inv.T, out_dtype=jnp.float32, interpret=True)
    assert_close(product, np.asarray(x) @ np.asarray(w), 0.05)
    gram = block_gemm(columns, columns_inv, columns, columns_inv, out_dtype=jnp.float32, interpret=True)
    assert_close(gram, np.asarray(x).T @ np.asarray(x), 0.05)


@pytest.mark.skipif(OLD, reason="JAX before 0.11 cannot trace these kernels")
@pytest.mark.parametrize("square", [True, False])
def test_each_block_leaves_the_tensor_cores_before_it_is_added(square):
    """Their sums keep about 14 bits: an accumulator lives for one wgmma over 128 of k, never over the loop."""
    blocks = jax.ShapeDtypeStruct((256 if not square else 2, 3), F32)
    operands = jax.ShapeDtypeStruct((128, 384), E4M3), jax.ShapeDtypeStruct((128, 3), F32)
    operands += (jax.ShapeDtypeStruct((256, 384), E4M3), blocks)
    jaxpr = jax.make_jaxpr(functools.partial(block_gemm, out_dtype=jnp.float32))(*operands)
    (steps,) = (
        eqn
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "scan"
        and any("wgmma" in inner.primitive.name for inner in equations(eqn.params["jaxpr"]))
    )
    assert steps.params["length"] == 3
    body = steps.params["jaxpr"].jaxpr
    assert not [eqn for eqn in body.eqns if "wgmma" in eqn.primitive.name]
    scopes = [[e.primitive.name for e in equations(eqn.params["jaxpr"])] for eqn in body.eqns if "jaxpr" in eqn.params]
    products = [names for names in scopes if "wgmma_ref" in names]
    assert products
    for names in products:
        # JAX 0.11 has the second name with a "_p" behind it.
        derefs = [name for name in names if name.startswith("wgmma_accumulator_deref")]
        assert (names.count("wgmma_ref"), len(derefs)) == (1, 1)


@pytest.mark.costly("(400, 272, 912)")
@pytest.mark.wide("(400, 272, 912)")
@interpreted
@pytest.mark.parametrize("shape", [(16, 16, 16), (400, 272, 912)], ids=str)
def test_the_kernels_lower_for_cuda(shape):
    """As far as a machine without a GPU can tell: layouts are found and the instructions exist."""
    m, n, k = shape
    x, f8 = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct
    blocks = -(-k // 128)
    for dtypes in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        for rows in (n, -(-n // 128)):
            operands = f8((m, k), dtypes[0]), f8((m, blocks), F32), f8((n, k), dtypes[1]), f8((rows, blocks), F32)
            for out_dtype in (jnp.float32, jnp.bfloat16):
                product = jax.jit(functools.partial(block_gemm, out_dtype=out_dtype))
                assert "mosaic_gpu" in product.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    for quantize in (block_quantize, block_quantize_2d):
        for power_of_two in (True, False):
            quantized = jax.jit(functools.partial(quantize, dtype=E5M2, power_of_two=power_of_two))
            assert "mosaic_gpu" in quantized.trace(x).lower(lowering_platforms=("cuda",)).as_text()


@interpreted
def test_layers_of_one_shape_share_one_lowering_of_each_kernel():
    """Lowering a kernel takes a second or two, and a model calls the same few hundreds of times."""

    def layer(x, w):
        rows, rows_inv, columns, columns_inv = block_quantize(x, E4M3)
        _, turned, w_inv = block_quantize_2d(w, E4M3)
        y = block_gemm(rows, rows_inv, turned, w_inv.T, out_dtype=jnp.bfloat16)
        return y, block_gemm(columns, columns_inv, columns, columns_inv, out_dtype=jnp.float32)

    def layers(x, w):
        grams = []
        for number in range(3):
            with jax.named_scope(f"layer_{number}"):
                x, gram = layer(x, w)
                grams.append(gram)
        return x, grams

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 128)))
    text = jax.jit(layers).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 4


def test_not_supported_without_a_gpu():
    ok, reason = supported()
    assert not ok
    assert ("JAX 0.11" if OLD else "platform cpu") in reason


@pytest.mark.skipif(not OLD, reason="what JAX before 0.11 is told")
def test_old_jax_is_refused():
    with pytest.raises(BackendUnavailableError, match=r"need JAX 0\.11"):
        block_quantize(jnp.ones((16, 16)), E4M3, interpret=True)


@pytest.mark.costly
def test_pallas_is_imported_only_where_it_is_used():
    code = "import sys, jax_te.ops.pallas as p; p.supported(); assert 'jax.experimental.pallas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": jnp.zeros((16, 128))}, TypeError, "a must be float8_e4m3fn or float8_e5m2, got float32"),
        ({"b": jnp.zeros((24, 128), E4M3)}, ValueError, r"multiples of 16, got shape \(24, 128\)"),
        ({"b": jnp.zeros((16, 144), E4M3)}, ValueError, "must share k"),
        ({"a_scale_inv": jnp.ones((16, 2))}, ValueError, r"a_scale_inv must be float32 of shape \(16, 1\)"),
        ({"b_scale_inv": jnp.ones((1, 1), jnp.bfloat16)}, ValueError, "got bfloat16"),
        ({"bias": jnp.ones((8,))}, ValueError, r"bias must have shape \(16,\)"),
        ({"out_dtype": jnp.int32}, TypeError, "out_dtype must be float32"),
    ],
)
def test_wrong_gemm_arguments_are_named(change, error, message):
    zeros = jnp.zeros((16, 128), E4M3)
    given = {"a": zeros, "a_scale_inv": jnp.ones((16, 1)), "b": zeros, "b_scale_inv": jnp.ones((1, 1))}
    with without_type_checker(), pytest.raises(error, match=message):
        block_gemm(**{**given, "out_dtype": jnp.float32, **change})


@pytest.mark.parametrize(
    ("quantize", "shape", "named"),
    [
        (block_quantize, (2, 16, 16), r"multiples of 16, got shape \(2, 16, 16\)"),
        (block_quantize_2d, (2, 2, 16, 16), r"multiples of 16, got shape \(2, 2, 16, 16\)"),
        (block_quantize_2d, (2, 8, 16), r"multiples of 16, got shape \(2, 8, 16\)"),
    ],
)
def test_wrong_quantize_arguments_are_named(quantize, shape, named):
    with pytest.raises(TypeError, match="float32, bfloat16 or float16, got int32"):
        quantize(jnp.zeros((16, 16), jnp.int32), E4M3)
    with pytest.raises(ValueError, match=named):
        quantize(jnp.zeros(shape), E4M3)
    with pytest.raises(TypeError, match="fp8_max takes"):
        quantize(jnp.zeros((16, 16)), jnp.bfloat16)
