"""The grouped Pallas kernels on a Hopper GPU, against fp32 products of each group's rows by XLA.

Within a step of 128 the tensor cores keep about 14 bits of a sum of FP8 products, and without `split_accumulator`
throughout: such products are within 2^-9 of exact ones, relative to all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops.pallas import grouped_gemm, grouped_gemm_over_rows, read_table, supported
from jax_te.ops.pallas.scaled_quantize import scaled_quantize
from jax_te.ops.pallas.tilings import LARGE, MEASURED
from tests.ops.test_grouped_kernels import block_operands, block_operands_over_rows, group_slices
from tests.ops.test_scaled_quantize import check as check_bits
from tests.ops.test_scaled_quantize import expected, operands
from tests.support.numerics import draw, relative_l2

pytestmark = pytest.mark.gpu

E4M3, E5M2, BF16, FP16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16
DTYPES = {
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "E4 E4": (E4M3, E4M3),
    "E5 E4": (E5M2, E4M3),
    "E4 E5": (E4M3, E5M2),
}
SIZES = {
    "uneven": [128, 0, 2560, 384, 1024, 128, 256, 2048],
    "one has all": [0, 0, 0, 7680, 0, 0, 0, 0],
    "nobody": [0] * 8,
    "many": [128] * 60,
}
ROWS = 7680
# Multiples of a tile; of a line of bf16, whose tiles reach past the end; of neither.
SHAPES = (2048, 4096), (960, 576), (272, 400)
# Every dtype with uneven groups, and all sizes of groups in one dtype of each kind.
CASES = pytest.mark.parametrize(
    ("sizes", "shape", "dtypes", "split"),
    [
        *(("uneven", shape, dtypes, split) for shape in SHAPES for dtypes in DTYPES for split in (False, True)),
        *((sizes, (272, 400), dtypes, False) for sizes in SIZES for dtypes in ("bf16", "E5 E4") if sizes != "uneven"),
    ],
)
WITHIN = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-8, E5M2: 2.0**-8}


@pytest.fixture(autouse=True)
def needs_hopper():
    ok, reason = supported()
    if not ok:
        pytest.fail(reason)


def product(a, b):
    return np.asarray(jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest"))


def check(actual, expected, dtype):
    actual = np.asarray(actual).astype(np.float32)
    assert np.isfinite(actual).all()
    if not expected.any():
        assert not actual.any()
    else:
        assert relative_l2(actual, expected) < WITHIN[dtype]


@CASES
def test_rows_times_their_groups_matrix(sizes, shape, dtypes, split):
    sizes, (k, n), (of_a, of_b) = SIZES[sizes], shape, DTYPES[dtypes]
    transposed, scale = of_a in (E4M3, E5M2), jnp.linspace(0.5, 2.0, len(sizes), dtype=jnp.float32)
    a, b = draw("a", (ROWS, k)).astype(of_a), draw("b", (len(sizes), n, k)).astype(of_b)
    b = b if transposed else b.swapaxes(1, 2)
    run = jax.jit(lambda sizes: grouped_gemm(
        a, b, sizes, scale, b_transposed=transposed, split_accumulator=split, out_dtype=jnp.float32
    ))  # fmt: skip
    expected = np.zeros((ROWS, n), np.float32)
    for group, rows in enumerate(group_slices(sizes)):
        matrix = b[group].T if transposed else b[group]
        expected[rows] = product(a[rows], matrix) * float(scale[group])
    actual = run(jnp.array(sizes))
    check(actual, expected, of_a)
    np.testing.assert_array_equal(actual, run(jnp.array(sizes)))  # the order of sums is fixed


@CASES
def test_sums_over_each_groups_rows(sizes, shape, dtypes, split):
    sizes, (m, n), (of_a, of_b) = SIZES[sizes], shape, DTYPES[dtypes]
    last, scale = of_a in (E4M3, E5M2), jnp.linspace(0.5, 2.0, len(sizes), dtype=jnp.float32)
    a, b = draw("a", (ROWS, m)).astype(of_a), draw("b", (ROWS, n)).astype(of_b)
    operands = (a.T, b.T) if last else (a, b)
    actual = jax.jit(lambda sizes: grouped_gemm_over_rows(
        *operands, sizes, scale, rows_last=last, split_accumulator=split, out_dtype=jnp.float32
    ))(jnp.array(sizes))  # fmt: skip
    expected = [product(a[rows].T, b[rows]) * float(s) for rows, s in zip(group_slices(sizes), scale, strict=True)]
    check(actual, np.stack(expected), of_a)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", ["E4 E4", "E5 E4", "E4 E5"])
@pytest.mark.parametrize("sizes", ["uneven", "nobody"])
def test_a_scale_for_each_block(sizes, dtypes, shape):
    sizes, dtypes = SIZES[sizes], DTYPES[dtypes]
    a, b, scales, expected = block_operands(sizes, ROWS, *shape, dtypes)
    actual = jax.jit(lambda sizes: grouped_gemm(
        a, b, sizes, scales, b_transposed=True, out_dtype=jnp.float32
    ))(jnp.array(sizes))  # fmt: skip
    check(actual, expected, dtypes[0])
    a, b, scales, expected = block_operands_over_rows(sizes, ROWS, *shape, dtypes)
    actual = jax.jit(lambda sizes: grouped_gemm_over_rows(
        a.T, b.T, sizes, scales, rows_last=True, out_dtype=jnp.float32
    ))(jnp.array(sizes))  # fmt: skip
    check(actual, expected, dtypes[0])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("high", [jnp.float32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_scaled_quantize(high, dtype):
    x, scale = operands(high)
    check_bits(scaled_quantize(x, scale, dtype), expected(x, scale, dtype))


def test_nan_and_inf_are_seen():
    x, scale = operands(BF16)
    _, _, amax = scaled_quantize(x.at[0, 3, 5].set(jnp.nan).at[1, 200, 300].set(-jnp.inf), scale, E4M3)
    assert np.isnan(amax[0, 0])
    assert np.isinf(amax[1, 1])
    assert np.isfinite(np.asarray(amax)[[0, 1], [1, 0]]).all()


@pytest.mark.parametrize(("shape", "tiling"), read_table(MEASURED).items(), ids=str)
def test_measured_tilings_give_the_rules_numbers(shape, tiling):
    """Bit for bit, on a smaller product of the same form whose last tiles are not full."""
    assert (shape.bits, shape.scaling) == (16, "none"), "this test makes operands for bf16 alone"
    small, sizes = shape._replace(rows=ROWS, k=512, n=1152), SIZES["uneven"]
    a = draw("a", (ROWS, small.k)).astype(BF16)
    b = draw("b", (ROWS, small.n) if small.over_rows else (len(sizes), small.k, small.n)).astype(BF16)
    b = b.swapaxes(-2, -1) if small.b_last else b

    def product(tiling):
        if small.over_rows:
            call = functools.partial(grouped_gemm_over_rows, a, b, rows_last=small.b_last)
        else:
            call = functools.partial(grouped_gemm, a, b, b_transposed=small.b_last)
        found = np.asarray(jax.jit(lambda sizes: call(sizes, out_dtype=jnp.float32, tiling=tiling))(jnp.array(sizes)))
        return found if small.over_rows else found[: sum(sizes)]

    expected = product(LARGE)
    assert np.isfinite(expected).all()
    assert expected.any()
    np.testing.assert_array_equal(product(tiling), expected)
