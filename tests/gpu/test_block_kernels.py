"""The Pallas block kernels on a Hopper GPU, against NumPy and fp32 products.

Quantization is exact with power-of-two scales. Within a block of 128 the tensor cores keep about 14 bits of a sum:
products are within 5e-4 of exact ones, whatever k is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops.pallas import block_gemm, block_quantize, block_quantize_2d, supported
from tests.ops.test_block_kernels import (
    E4M3,
    E5M2,
    check_all,
    dequantized,
    expected_product,
    expected_quantized,
    expected_quantized_2d,
    gemm_operands,
    many_scales,
)
from tests.support.numerics import draw, relative_l2

pytestmark = pytest.mark.gpu

HIGH = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@pytest.fixture(autouse=True)
def needs_hopper():
    ok, reason = supported()
    if not ok:
        pytest.fail(reason)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("high", list(HIGH))
@pytest.mark.parametrize("shape", [(272, 400), (1024, 512)], ids=str)
def test_quantize(shape, high, dtype):
    x = many_scales(shape, HIGH[high])
    x = x.at[:16].set(0).at[20, 3].set(jnp.inf)
    check_all(block_quantize(x, dtype), expected_quantized(x, dtype, True))
    check_all(block_quantize_2d(x, dtype), expected_quantized_2d(x, dtype, True))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_quantize_with_any_scale(dtype):
    x = many_scales((272, 400))
    actual, expected = block_quantize(x, dtype, power_of_two=False), expected_quantized(x, dtype, False)
    for data, scale_inv, other, other_inv in zip(actual[::2], actual[1::2], expected[::2], expected[1::2], strict=True):
        np.testing.assert_allclose(scale_inv, other_inv, rtol=2.0**-21)
        assert relative_l2(dequantized(data, scale_inv), dequantized(other, other_inv)) < 1e-3
        assert (np.asarray(data).view(np.uint8) == other.view(np.uint8)).mean() > 0.99


@pytest.mark.parametrize("forms", [("row", "square"), ("row", "row"), ("square", "row")], ids="-".join)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=["E4 E4", "E4 E5", "E5 E4"])
@pytest.mark.parametrize("shape", [(1024, 768, 1024), (400, 272, 912), (16, 16, 16)], ids=str)
def test_gemm(shape, dtypes, forms):
    operands, bias = gemm_operands(*shape, dtypes, forms), draw("bias", shape[1:2], scale=1e3)
    expected = expected_product(*operands)
    for out_dtype, tolerance in (("float32", 5e-4), ("bfloat16", 3e-3)):
        assert relative_l2(block_gemm(*operands, out_dtype=out_dtype), expected) < tolerance
        out = block_gemm(*operands, bias, out_dtype=out_dtype)
        assert relative_l2(out, expected + np.asarray(bias, np.float64)) < tolerance
    small = [operands[0], operands[1] * 2.0**-12, *operands[2:]]
    assert relative_l2(block_gemm(*small, out_dtype="float16"), expected * 2.0**-12) < 1e-3


@pytest.mark.parametrize("forms", [("row", "square"), ("row", "row")], ids="-".join)
def test_a_long_sum_of_positive_terms_keeps_fp32s_accuracy(forms):
    operands = gemm_operands(256, 256, 32768, forms=forms, positive=True)
    out = block_gemm(*operands, out_dtype="float32")
    assert relative_l2(out, expected_product(*operands)) < 1e-3, "tensor cores alone would be off by more"


def test_every_tile_of_a_large_product():
    """More tiles than multiprocessors: the ring of stages runs on from tile to tile."""
    operands = gemm_operands(4096, 4352, 1152, forms=("row", "row"))
    expected = expected_product(*operands)
    for _ in range(3):
        assert relative_l2(block_gemm(*operands, out_dtype="float32"), expected) < 5e-4
    square = gemm_operands(4096, 4352, 1152)
    assert (
        relative_l2(jax.jit(lambda *o: block_gemm(*o, out_dtype="float32"))(*square), expected_product(*square)) < 5e-4
    )


def test_quantize_2d_is_the_same_every_time():
    """Many tiles, many calls: two groups of threads share each tile's maximum."""
    x = many_scales((2048, 2048), jnp.float16)
    quantize = jax.jit(lambda x: block_quantize_2d(x, E5M2))
    first = [np.asarray(part) for part in quantize(x)]
    check_all(first, expected_quantized_2d(x, E5M2, True))
    for _ in range(30):
        for one, other in zip(quantize(x), first, strict=True):
            assert np.array_equal(np.asarray(one).view(np.uint8), other.view(np.uint8))
