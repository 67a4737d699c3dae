"""Values and scales of every quantizer of block formats, bit for bit against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_te.quantize import BlockQuantizer, MXQuantizer, NVFP4Quantizer, TensorQuantizer, quantize, quantize_operand
from jax_te.quantize.hadamard import hadamard_rows
from tests.support import formulas, oracles
from tests.support.numerics import assert_bitwise, assert_close, draw, without_type_checker
from tests.support.oracles import E4M3, E5M2, F32

DTYPES = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}
HIGH = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPE = (144, 272)  # multiples of 16 only


def block_case(dtype, two_dimensional, power_of_two):
    options = {"two_dimensional": two_dimensional, "power_of_two": power_of_two}
    return BlockQuantizer(dtype=DTYPES[dtype], **options), formulas.block_formula(dtype, **options)


def nvfp4_case(**options):
    return NVFP4Quantizer(**options), formulas.nvfp4_formula(**options)


CASES = {
    "1x128": block_case(E4M3, False, True),
    "1x128 E5M2": block_case(E5M2, False, True),
    "1x128 fp32 scales": block_case(E4M3, False, False),
    "128x128": block_case(E4M3, True, True),
    "128x128 E5M2 fp32 scales": block_case(E5M2, True, False),
    "mx": (MXQuantizer(dtype=jnp.float8_e4m3fn), formulas.mx_formula(E4M3)),
    "mx E5M2": (MXQuantizer(dtype=jnp.float8_e5m2), formulas.mx_formula(E5M2)),
    "nvfp4": nvfp4_case(),
    "nvfp4 2-D": nvfp4_case(two_dimensional=True),
    "nvfp4 hadamard": nvfp4_case(hadamard=True),
    "tensor": (
        TensorQuantizer(dtype=DTYPES[E4M3], power_of_two=True),
        formulas.tensor_formula(E4M3, power_of_two=True),
    ),
    "tensor E5M2": (
        TensorQuantizer(dtype=DTYPES[E5M2], power_of_two=True),
        formulas.tensor_formula(E5M2, power_of_two=True),
    ),
}


def values(kind, shape=SHAPE):
    """fp32 values whose sums of 16 are exact in fp32 if ``kind`` is "even"; many magnitudes and special blocks else."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    if kind == "even":
        return F32(np.round(x * 64) / 64)
    x = x * np.exp2(rng.uniform(-20, 6, shape)) * np.exp2(rng.integers(-9, 9, (shape[0], 1)))
    if kind == "special blocks":
        x[3] = 0.0
        x[4] = -0.0
        x[5, ::3] = 1e-39  # below fp32's normal numbers
        x[6] = 2.0**-126 * rng.uniform(1, 2, shape[1])
        x[7] *= 1e-30
        x[8, :16] = [448.0, 449.0, -464.0, 57344.0, 60000.0, 6.0, 5.0, 2.5, 7.0, 0.25, 1.75, 3.5, 0.75, 14.0, 28.0, 1.0]
        x[:, 5] = 0.0
    elif kind == "near overflow":
        x[9] = 3e38 * rng.uniform(-1, 1, shape[1])
        x[100, 200] = 3.4e38
    elif kind == "inf":
        x[10, 20], x[70, 150] = np.inf, -np.inf
    elif kind == "nan":
        x[11, 21] = np.nan
    return F32(x)


@functools.cache
def both_directions(name, jit):
    quantizer, _ = CASES[name]

    def run(x):
        return quantize(x, quantizer)[0], quantize(x, quantizer, columnwise=True)[0]

    return jax.jit(run) if jit else run


def check(q, expected, x):
    assert_bitwise(q.scale_inv.reshape(expected.scale_inv.shape), expected.scale_inv, what="scale_inv")
    if expected.tensor_scale_inv is not None:
        assert_bitwise(q.tensor_scale_inv, expected.tensor_scale_inv, what="tensor_scale_inv")
    # E2M1 has no nan: where the scale is nan, so is the value, whatever the data.
    data, wanted = np.asarray(q.data).reshape(expected.data.shape), expected.data
    known = ~np.isnan(formulas.spread(expected.scale_inv.astype(F32), expected.block, wanted.shape))
    assert_bitwise(data[known], wanted[known], what="data")
    if not known.all():
        assert np.isnan(np.asarray(q.values())[~known]).all()
    assert (q.dtype, q.shape, q.rotated) == (x.dtype, x.shape, expected.rotated)


KINDS = ["even", "magnitudes", "special blocks", "near overflow", "inf", "nan"]


@pytest.mark.costly(
    "mx E5M2-float16-True",
    slow=(
        "128x128-float32-False",
        "1x128-float32-False",
        "nvfp4-float32-False",
        "mx-float32-False",
        "nvfp4 2-D-bfloat16-True",
        "tensor-float32-False",
        "1x128 fp32 scales-float16-True",
        "1x128 E5M2-bfloat16-True",
    ),
)
@pytest.mark.wide
@pytest.mark.parametrize(
    ("high", "jit"), [("float32", False), ("float32", True), ("bfloat16", True), ("float16", True)]
)
@pytest.mark.parametrize("name", list(CASES))
def test_values_and_scales(name, high, jit):
    _, formula = CASES[name]
    for kind in KINDS[:1] if "hadamard" in name else KINDS:  # only exact sums are the same in every order
        with np.errstate(over="ignore"):
            x = values(kind).astype(HIGH[high])
        for q, columnwise in zip(both_directions(name, jit)(jnp.asarray(x)), (False, True), strict=True):
            check(q, formula(x, columnwise), x)


@pytest.mark.costly("shape0-2-1x128", "shape1-1-nvfp4 hadamard", "shape2--1-mx", "shape3--1-nvfp4")
@pytest.mark.wide
@pytest.mark.parametrize("name", ["1x128", "128x128", "mx", "nvfp4", "nvfp4 2-D", "nvfp4 hadamard", "tensor"])
@pytest.mark.parametrize(("shape", "axis"), [((2, 24, 3, 25), 2), ((48, 3, 15), 1), ((3, 16, 40), -1), ((16, 5), -1)])
def test_matrix_views_and_partial_blocks(name, shape, axis):
    """Blocks lie in the matrix whose columns are the axes from ``axis`` on."""
    quantizer, formula = CASES[name]
    x = values("even", (int(np.prod(shape)), 1)).reshape(shape)
    matrix = x.reshape(int(np.prod(shape[:axis])), -1)
    for columnwise in (False, True):
        q, _ = jax.jit(lambda x, c=columnwise: quantize(x, quantizer, axis=axis, columnwise=c))(jnp.asarray(x))
        expected = formula(matrix, columnwise)
        check(q, expected, x)
        if not expected.rotated:
            np.testing.assert_allclose(q.values().reshape(matrix.shape), expected.values(), rtol=2.0**-22)


@pytest.mark.wide
@pytest.mark.parametrize("high", list(HIGH))
@pytest.mark.parametrize("name", [name for name in CASES if "hadamard" not in name])
def test_dequantize_is_within_half_a_spacing(name, high):
    """A value errs by half the distance of its neighbours times its block's scale, and by the roundings of the scale,
    of the product and of the result: 2^-23 of it and one half spacing of its dtype.
    """
    quantizer, formula = CASES[name]
    x = values("even").astype(HIGH[high])
    q, _ = jax.jit(lambda x: quantize(x, quantizer))(jnp.asarray(x))
    wide, expected = x.astype(np.float64), formula(x, False)
    scale_inv = formulas.spread(expected.scale_inv.astype(np.float64), expected.block, x.shape)
    scale_inv = scale_inv * np.float64(1.0 if expected.tensor_scale_inv is None else expected.tensor_scale_inv)
    rounding = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}[high]
    # NVFP4 rounds its scales: a block's amax may lie up to 2^-4 above the largest value. Half a spacing is more.
    bound = formulas.half_spacing(expected.scaled, expected.data.dtype) * scale_inv
    bound = bound + (np.abs(wide) + bound) * (2.0**-22 + 2 * rounding)
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - wide)
    assert (error <= bound).all()
    assert error.max() > 0.2 * bound.max()


def test_hadamard_rows_keep_the_subnormal_numbers_of_fp16():
    """Of the size of late gradients; sums of 16 such numbers are exact in fp32."""
    x = draw("x", (32, 8), jnp.float16, scale=1e-5)
    assert (abs(x) < jnp.finfo(jnp.float16).smallest_normal).all()
    expected = formulas.rotate(np.asarray(x)).astype(np.float16)
    assert np.count_nonzero(expected) > 200
    assert_bitwise(jax.jit(hadamard_rows)(x), expected)
    # What the quantizers read is fp32, in which a compiler may leave the rounding to fp16 out.
    assert_bitwise(jax.jit(lambda x: hadamard_rows(x).astype(jnp.float32))(x), expected.astype(np.float32))


def test_hadamard_matrix():
    matrix = np.asarray(hadamard_rows(jnp.eye(16))).T
    assert_bitwise(matrix, F32(formulas.hadamard()))
    assert_bitwise(matrix @ matrix.T, np.eye(16, dtype=F32))


@pytest.mark.parametrize("high", list(HIGH))
def test_hadamard_rows(high):
    exact = values("even", (64, 24)).astype(HIGH[high])
    rotated = jax.jit(hadamard_rows)(jnp.asarray(exact))
    assert_bitwise(rotated, formulas.rotate(exact))
    x, tolerance = draw("x", (64, 24), high), {"float32": 2.0**-21, "bfloat16": 2.0**-8, "float16": 2.0**-11}[high]
    rotated = jax.jit(hadamard_rows)(x)
    assert rotated.dtype == x.dtype
    assert_close(rotated, np.kron(np.eye(4), formulas.hadamard()).T @ oracles.wide(x)[0], tolerance)
    assert_close(jax.jit(lambda x: hadamard_rows(x, inverse=True))(rotated), x, 2 * tolerance)
    other = draw("other", (64, 8), high)
    product, before = (
        oracles.wide(a)[0].T @ oracles.wide(b)[0] for a, b in ((rotated, jax.jit(hadamard_rows)(other)), (x, other))
    )
    assert_close(product, before, 2 * tolerance)
    with pytest.raises(ValueError, match="takes a multiple of 16 rows, got 24"):
        hadamard_rows(x[:24])


def test_dequantize_rotates_back():
    x = draw("x", (64, 48), jnp.bfloat16)
    q = jax.jit(lambda x: quantize(x, NVFP4Quantizer(hadamard=True), columnwise=True)[0])(x)
    back = (
        np.kron(np.eye(4), formulas.hadamard()) @ formulas.nvfp4_blocks(np.asarray(x), (16, 1), hadamard=True).values()
    )
    assert q.rotated
    assert_close(jax.jit(lambda q: q.dequantize())(q), back, 2.0**-8)
    assert 0.05 < np.linalg.norm(back - oracles.wide(x)[0]) / np.linalg.norm(oracles.wide(x)[0]) < 0.15


# ---------------------------------------------------------------- stochastic rounding

STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True)


@pytest.mark.costly("float32-False-False-False", slow=("bfloat16-True-True-False",))
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("high", "hadamard", "columnwise"), [("float32", False, False), ("bfloat16", True, True)])
def test_stochastic_rounding_gives_one_of_two_neighbours(high, hadamard, columnwise, jit):
    x = values("even").astype(HIGH[high])
    quantizer = NVFP4Quantizer(stochastic_rounding=True, hadamard=hadamard)

    def run(x):
        return quantize(x, quantizer, columnwise=columnwise)[0]

    q = (jax.jit(run) if jit else run)(jnp.asarray(x))
    expected = formulas.nvfp4_blocks(x, (16, 1) if columnwise else (1, 16), hadamard=hadamard)
    assert_bitwise(q.scale_inv, expected.scale_inv)
    below, above = formulas.neighbours(expected.scaled)
    data = np.asarray(q.data).astype(np.float64)
    assert ((data == below) | (data == above)).all()
    # The share that went away from 0 has a standard error of at most 1 / 2 sqrt(n).
    between = below != above
    share = np.abs((expected.scaled - below)[between] / (above - below)[between])
    went = (data == above)[between]
    assert abs(went.mean() - share.mean()) < 4 * 0.5 / np.sqrt(between.sum()) + 2.0**-16
    assert_bitwise(q.data, jax.jit(run)(jnp.asarray(x)).data, what="eager and jit")


def test_values_of_the_format_are_never_rounded():
    """Also where the random bits are 0, one of 65,536: P(up) is exactly 0 there."""
    x = np.tile(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32), (512, 512))
    q = jax.jit(lambda x: quantize(x, STOCHASTIC)[0])(jnp.asarray(x))
    assert_bitwise(q.data.astype(jnp.float32), x * float(q.data.astype(jnp.float32)[0, 7]) / 6.0)


@pytest.mark.costly("float32")
@pytest.mark.parametrize("high", ["float32", "bfloat16"])
def test_stochastic_rounding_is_unbiased_and_has_the_right_variance(high):
    """Many roundings of the same values, each in a tensor with other values in its last rows."""
    trials = 400
    x = np.clip(values("even", (64, 64)), -3, 3)
    x[-1, 0] = 6.0  # one tensor scale for all
    noise = np.random.default_rng(1).uniform(-1, 1, (trials, 16, 64))
    tensors = np.repeat(x[None], trials, 0).astype(HIGH[high])
    tensors[:, -16:] = (np.round(noise * 64) / 64).astype(HIGH[high])
    tensors[:, -1, 0] = 6.0
    data = jax.jit(jax.vmap(lambda x: quantize(x, STOCHASTIC)[0].data.astype(jnp.float32)))(jnp.asarray(tensors))
    data = np.asarray(data, np.float64)[:, :48]
    scaled = formulas.nvfp4_blocks(tensors[0], (1, 16)).scaled[:48].astype(np.float64)
    below, above = formulas.neighbours(scaled)
    step = np.abs(above - below)
    share = np.where(step > 0, np.abs(scaled - below) / np.where(step > 0, step, 1), 0)
    deviation = step * np.sqrt(share * (1 - share) / trials)  # of the mean of a binomial variable
    error = data.mean(0) - scaled
    assert (np.abs(error) <= 5 * deviation + step * 2.0**-16).all(), "5 standard errors: 1 of 1.7 million by chance"
    moving = deviation > 0
    assert 0.9 < np.std(error[moving] / deviation[moving]) < 1.1, (
        "independent from tensor to tensor and element to element"
    )
    assert abs(np.mean(error[moving] / deviation[moving])) < 5 / np.sqrt(moving.sum())


@pytest.mark.costly("float32")
@pytest.mark.parametrize("high", ["float32", "bfloat16"])
def test_the_same_tensor_always_rounds_the_same_and_another_differently(high):
    run = jax.jit(lambda x: quantize(x, STOCHASTIC)[0])
    x = jnp.asarray(np.clip(values("even", (64, 512)), -3, 3)).at[0, 0].set(6.0).astype(high)
    first = run(x)
    assert_bitwise(run(jnp.array(x, copy=True)).data, first.data)
    others = {
        "one element changed": x.at[-1, -1].set(jnp.asarray(0.75, high)),
        "halved": x / 2,
        "negated": -x,
        "rows in another order": jnp.roll(x, 1, axis=0),
    }
    for what, other in others.items():
        data = run(other).data.astype(jnp.float32)
        data = {"negated": -data, "rows in another order": jnp.roll(data, -1, axis=0)}.get(what, data)
        different = float(jnp.mean(data != first.data.astype(jnp.float32)))
        # Values round up with probability p in both, so two draws differ with 2 p (1 - p), a third in the mean.
        assert 0.2 < different < 0.45, f"{what}: {different}"


@pytest.mark.costly
def test_rounding_does_not_depend_on_the_mesh():
    quantizer = NVFP4Quantizer(stochastic_rounding=True, hadamard=True)
    x = draw("x", (64, 64), jnp.bfloat16)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def run(x):
        return quantize_operand(x, quantizer)[0]

    alone = jax.jit(run)(x)
    for spec in (("a", "b"), (None, ("b", "a"))):
        with jax.set_mesh(mesh):
            sharded = jax.jit(run)(
                jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
            )
        for ours, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
            assert_bitwise(ours, expected, what=str(spec))


# ---------------------------------------------------------------- what quantizers are


@pytest.mark.parametrize("name", list(CASES))
def test_quantizers_are_hashable_data_and_say_whether_directions_differ(name):
    quantizer, formula = CASES[name]
    assert quantizer == type(quantizer)(**vars(quantizer))
    assert hash(quantizer) == hash(type(quantizer)(**vars(quantizer)))
    matrix = values("even", (32, 32)) * np.exp2(F32(2) * np.arange(32, dtype=F32))

    def run(x):
        operand, amax = quantize_operand(x, quantizer)
        assert (operand.columnwise is None) == (not quantizer.directional)
        assert (amax is None) == (not isinstance(quantizer, TensorQuantizer))

    jax.eval_shape(run, matrix)
    same = np.array_equal(formula(matrix, False).values(), formula(matrix, True).values())
    assert same == (not quantizer.directional)


def test_wrong_dtypes():
    for quantizer in (BlockQuantizer, MXQuantizer, TensorQuantizer):
        with pytest.raises(TypeError, match="float8_e4m3fn or float8_e5m2, got float4_e2m1fn"):
            quantizer(dtype=jnp.float4_e2m1fn)
    with pytest.raises(TypeError, match="NVFP4Quantizer's dtype must be float4_e2m1fn, got float8_e4m3fn"):
        NVFP4Quantizer(dtype=jnp.float8_e4m3fn)
    with without_type_checker(), pytest.raises(ValueError, match="'given', 'current', got 'block'"):
        TensorQuantizer(dtype=jnp.float8_e4m3fn, scaling="block")
