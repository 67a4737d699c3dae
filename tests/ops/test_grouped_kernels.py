"""The grouped Pallas kernels in Pallas's GPU interpreter, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops.pallas import grouped_gemm, grouped_gemm_over_rows
from jax_te.ops.pallas.grouped_gemm import BlockScales
from jax_te.ops.pallas.tilings import BLOCK_OVER_ROWS, LARGE, SMALL, SPLIT, GemmTiling
from tests.support.numerics import assert_close, draw

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
OLD = jax.__version_info__[:2] < (0, 11)
interpreted = pytest.mark.skipif(OLD, reason="JAX before 0.11 has no interpreter for these kernels")

ROWS = 768
SIZES = {
    "uneven": [128, 0, 384, 128],  # and 128 rows of nobody
    "one has all": [0, 0, 768, 0],
    "nobody": [0, 0, 0, 0],
}


def exact(x):
    return np.asarray(x).astype(np.float64)


def group_slices(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def expected_rows(a, b, sizes, scale):
    """``b [e, k, n]``."""
    out = np.zeros((a.shape[0], b.shape[2]))
    for group, rows in enumerate(group_slices(sizes)):
        out[rows] = exact(a)[rows] @ exact(b)[group] * scale[group]
    return out


def expected_over_rows(a, b, sizes, scale):
    return np.stack([exact(a)[r].T @ exact(b)[r] * s for r, s in zip(group_slices(sizes), scale, strict=True)])


def tolerance(out_dtype):
    """Of one rounding, and of fp32 sums of some hundred products."""
    return {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}[jnp.dtype(out_dtype).name]


def small(tiling: GemmTiling) -> GemmTiling:
    """The same with two buffers, which these sums go round in."""
    return GemmTiling(**{**vars(tiling), "stages": 2})


TILINGS = {"large": small(LARGE), "small": small(SMALL)}


@pytest.mark.costly(slow=("uneven-large", "one has all-large", "nobody-large", "one has all-small", "uneven-small"))
@interpreted
@pytest.mark.parametrize("tiling", list(TILINGS))
@pytest.mark.parametrize("sizes", list(SIZES))
def test_rows_times_their_groups_matrix(sizes, tiling):
    sizes, (a, b) = SIZES[sizes], (draw("a", (ROWS, 192), BF16), draw("b", (4, 192, 264), BF16))
    out = grouped_gemm(a, b, jnp.array(sizes), out_dtype="float32", tiling=TILINGS[tiling], interpret=True)
    assert_close(out, expected_rows(a, b, sizes, np.ones(4)), tolerance("float32"))


@pytest.mark.costly(slow=("E4 E4-True", "E5 E4-False", "fp16-True", "fp16-False", "E5 E4-True"))
@interpreted
@pytest.mark.parametrize("split", [False, True], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(E4M3, E4M3), (E5M2, E4M3), (jnp.float16, jnp.float16)], ids=["E4 E4", "E5 E4", "fp16"]
)
def test_transposed_matrices_dtypes_and_scales(dtypes, split):
    sizes, scale = SIZES["uneven"], jnp.array([0.5, 2.0, 3.0, 1.0])
    a, b = draw("a", (ROWS, 272)).astype(dtypes[0]), draw("b", (4, 144, 272)).astype(dtypes[1])
    out = grouped_gemm(
        a, b, jnp.array(sizes), scale, b_transposed=True, split_accumulator=split, out_dtype="bfloat16", interpret=True
    )
    assert_close(out, expected_rows(a, b.swapaxes(1, 2), sizes, scale), tolerance("bfloat16"))


@pytest.mark.costly(slow=("uneven-large", "one has all-large", "nobody-large", "one has all-small", "uneven-small"))
@interpreted
@pytest.mark.parametrize("tiling", list(TILINGS))
@pytest.mark.parametrize("sizes", list(SIZES))
def test_sums_over_each_groups_rows(sizes, tiling):
    sizes, (a, b) = SIZES[sizes], (draw("a", (ROWS, 136), BF16), draw("b", (ROWS, 264), BF16))
    out = grouped_gemm_over_rows(a, b, jnp.array(sizes), out_dtype="float32", tiling=TILINGS[tiling], interpret=True)
    assert_close(out, expected_over_rows(a, b, sizes, np.ones(4)), tolerance("float32"))


@pytest.mark.costly(slow=("True",))
@interpreted
@pytest.mark.parametrize("split", [False, True], ids=str)
def test_sums_over_rows_of_fp8(split):
    sizes, scale = SIZES["uneven"], jnp.array([0.5, 2.0, 3.0, 1.0])
    a, b = draw("a", (ROWS, 136)).astype(E4M3), draw("b", (ROWS, 144)).astype(E5M2)
    out = grouped_gemm_over_rows(
        a.T, b.T, jnp.array(sizes), scale, rows_last=True, split_accumulator=split, out_dtype="float32", interpret=True
    )
    assert_close(out, expected_over_rows(a, b, sizes, scale), tolerance("float32"))


def powers_of_two(name, *shape):
    """Scales whose products with FP8 values are exact."""
    return jnp.exp2(jnp.round(draw(name, shape)))


def spread(scales, *shape, over):
    """The scale of each value: ``scales`` along ``shape``, each for 128 of the axes ``over``."""
    out = exact(scales)
    for axis in over:
        out = np.repeat(out, 128, axis)
    return out[tuple(slice(size) for size in shape)]


def block_operands(sizes, rows, k, n, dtypes=(E4M3, E4M3)):
    """Operands of `grouped_gemm` with `BlockScales`, and the expected product."""
    e, blocks = len(sizes), -(-k // 128)
    a, b = draw("a", (rows, k)).astype(dtypes[0]), draw("b", (e, n, k)).astype(dtypes[1])
    scales = BlockScales(powers_of_two("sa", blocks, rows), powers_of_two("sb", e, blocks, -(-n // 128)))
    wide_a = exact(a) * spread(scales.a.T, rows, k, over=(1,))
    wide_b = exact(b).swapaxes(1, 2) * spread(scales.b, e, k, n, over=(1, 2))
    return a, b, scales, expected_rows(wide_a, wide_b, sizes, np.ones(e))


def block_operands_over_rows(sizes, rows, m, n, dtypes=(E4M3, E4M3)):
    """Operands of `grouped_gemm_over_rows` with `BlockScales`, rows first, and the expected product."""
    a, b = draw("a", (rows, m)).astype(dtypes[0]), draw("b", (rows, n)).astype(dtypes[1])
    scales = BlockScales(powers_of_two("sa", rows // 128, m), powers_of_two("sb", rows // 128, n))
    wide_a, wide_b = exact(a) * spread(scales.a, rows, m, over=(0,)), exact(b) * spread(scales.b, rows, n, over=(0,))
    return a, b, scales, expected_over_rows(wide_a, wide_b, sizes, np.ones(len(sizes)))


@pytest.mark.costly(slow=("uneven",))
@interpreted
@pytest.mark.parametrize("sizes", ["uneven", "nobody"])
def test_rows_with_a_scale_for_each_block(sizes):
    sizes = SIZES[sizes]
    a, b, scales, expected = block_operands(sizes, ROWS, 272, 144)
    out = grouped_gemm(a, b, jnp.array(sizes), scales, b_transposed=True, out_dtype="float32", interpret=True)
    assert_close(out, expected, tolerance("float32"))


@pytest.mark.costly(slow=("uneven",))
@interpreted
@pytest.mark.parametrize("sizes", ["uneven", "nobody"])
def test_sums_over_rows_with_a_scale_for_each_block(sizes):
    sizes = SIZES[sizes]
    a, b, scales, expected = block_operands_over_rows(sizes, ROWS, 272, 144, (E4M3, E5M2))
    out = grouped_gemm_over_rows(
        a.T, b.T, jnp.array(sizes), scales, rows_last=True, out_dtype="float32", interpret=True
    )
    assert_close(out, expected, tolerance("float32"))


def test_scales_of_blocks_that_do_not_fit_are_refused():
    a, b = zeros(128, 256, dtype=E4M3), zeros(1, 128, 256, dtype=E4M3)
    scales = BlockScales(jnp.ones((2, 128)), jnp.ones((1, 2, 128)))
    with pytest.raises(ValueError, match=r"float32 \(2, 128\) and \(1, 2, 1\)"):
        grouped_gemm(a, b, jnp.array([128]), scales, b_transposed=True, out_dtype=BF16)
    scales = BlockScales(jnp.ones((1, 64)), jnp.ones((1, 64)))
    with pytest.raises(TypeError, match="must be FP8, got bfloat16"):
        grouped_gemm_over_rows(zeros(128, 64), zeros(128, 64), jnp.array([128]), scales, out_dtype=BF16)


@pytest.mark.costly
@interpreted
def test_sizes_are_values():
    """One program for all of them."""
    a, b = draw("a", (ROWS, 64), BF16), draw("b", (4, 64, 128), BF16)
    traces = []

    @jax.jit
    def run(sizes):
        traces.append(sizes)
        return grouped_gemm(a, b, sizes, out_dtype="float32", interpret=True)

    for sizes in SIZES.values():
        assert_close(run(jnp.array(sizes)), expected_rows(a, b, sizes, np.ones(4)), tolerance("float32"))
    assert len(traces) == 1


def zeros(*shape, dtype=BF16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("error", "words", "a", "b", "options"),
    [
        (TypeError, "both FP8", zeros(128, 64), zeros(1, 64, 128, dtype=jnp.float16), {}),
        (TypeError, "both FP8", zeros(128, 64, dtype=jnp.float32), zeros(1, 64, 128, dtype=jnp.float32), {}),
        (TypeError, "out_dtype", zeros(128, 64), zeros(1, 64, 128), {"out_dtype": E4M3}),
        (ValueError, "k last", zeros(128, 64, dtype=E4M3), zeros(1, 64, 128, dtype=E4M3), {}),
        (ValueError, "go together", zeros(128, 64), zeros(1, 128, 64), {}),
        (ValueError, "multiple of 128", zeros(64, 64), zeros(1, 64, 128), {}),
        (ValueError, "empty", zeros(128, 0), zeros(1, 0, 128), {}),
    ],
    ids=["mixed", "fp32", "out", "fp8", "shapes", "rows", "empty"],
)
def test_what_does_not_fit_is_refused(error, words, a, b, options):
    with pytest.raises(error, match=words):
        grouped_gemm(a, b, jnp.array([128]), **{"out_dtype": BF16, **options})


@pytest.mark.parametrize(
    ("words", "a", "b", "rows_last"),
    [
        ("must have the same rows", zeros(128, 64), zeros(256, 64), False),
        ("multiple of 128", zeros(64, 64), zeros(64, 64), False),
        ("summed over last", zeros(128, 64, dtype=E4M3), zeros(128, 64, dtype=E4M3), False),
        ("must have the same rows", zeros(64, 128), zeros(64, 256), True),
    ],
    ids=["shapes", "rows", "fp8", "rows last"],
)
def test_what_does_not_fit_over_rows_is_refused(words, a, b, rows_last):
    with pytest.raises(ValueError, match=words):
        grouped_gemm_over_rows(a, b, jnp.array([128]), out_dtype="float32", rows_last=rows_last)


@pytest.mark.skipif(not OLD, reason="these versions of JAX run the kernels")
def test_old_jax_is_told():
    with pytest.raises(BackendUnavailableError, match=r"JAX 0\.11"):
        grouped_gemm(zeros(128, 64), zeros(1, 64, 128), jnp.array([128]), out_dtype=BF16)


def test_tilings_fit_the_registers_of_a_multiprocessor():
    for tiling in (LARGE, SMALL, SPLIT, BLOCK_OVER_ROWS):
        multiplying, loading = tiling.registers
        assert 128 * (tiling.warpgroups * multiplying + loading) <= 65536
