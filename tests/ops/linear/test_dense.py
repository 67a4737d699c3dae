"""`dense` on the XLA backend against fp64 NumPy: plain, and with each GEMM operand quantized by an independent
formula.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import dense
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.support import oracles
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, value_and_vjp, wide

ONE_ROUNDING = TOLERANCE | {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""An fp32 sum rounded once errs by 2^-9 / √3 of itself in the mean; rounded before it is scaled, too, by over 2^-9."""

SHAPES = {  # x, kernel
    "two axes": ((32, 48), (48, 64)),
    "batch and sequence": ((2, 16, 32), (32, 48)),
    "several output axes": ((2, 16, 32), (32, 3, 16)),
}


def inputs(shapes, dtype, params_dtype=jnp.float32, *, bias=True):
    x_shape, kernel_shape = SHAPES[shapes]
    x, g = draw("x", x_shape, dtype), draw("g", (*x_shape[:-1], *kernel_shape[1:]), dtype, scale=0.1)
    return (
        x,
        draw("kernel", kernel_shape, params_dtype, scale=0.2),
        draw("bias", kernel_shape[1:], params_dtype) if bias else None,
        g,
    )


@pytest.mark.parametrize(
    ("shapes", "dtype", "jit"),
    [(shapes, dtype, True) for shapes in SHAPES for dtype in ("float32", "bfloat16")]
    + [("two axes", "float16", True), ("two axes", "float32", False), ("several output axes", "bfloat16", False)],
)
def test_without_a_recipe(shapes, dtype, jit):
    x, kernel, bias, g = inputs(shapes, dtype)
    y, (dx, dkernel, dbias) = value_and_vjp(lambda *a: dense(*a, backend="xla"), (x, kernel, bias), g, jit=jit)
    rounded = kernel.astype(dtype)  # a kernel is cast to the compute dtype
    expected = oracles.dense_layer(oracles.Unquantized(), x, rounded, bias.astype(dtype), g)
    assert [a.dtype for a in (y, dx, dkernel, dbias)] == [x.dtype, x.dtype, jnp.float32, jnp.float32]
    assert_close(y, expected["y"], TOLERANCE[dtype], what="y")
    assert_close(dx, expected["x"], ONE_ROUNDING[dtype], what="dx")
    # fp32 parameters get unrounded fp32 gradients whatever the compute dtype is.
    assert_close(dkernel, expected["kernel"], TOLERANCE["float32"], what="dkernel")
    assert_close(dbias, expected["bias"], TOLERANCE["float32"], what="dbias")


def test_wgrad_of_fp32_parameters_is_not_rounded_to_the_compute_dtype():
    x, kernel, _, g = inputs("two axes", "bfloat16", bias=False)
    _, (_, dkernel) = value_and_vjp(lambda x, k: dense(x, k, backend="xla"), (x, kernel), g)
    representable = dkernel == dkernel.astype(jnp.bfloat16).astype(jnp.float32)
    assert float(jnp.mean(representable)) < 0.1, "bf16 holds about 1 in 2^16 fp32 values"


@pytest.mark.parametrize("params_dtype", ["bfloat16", "float16"])
def test_gradients_have_their_parameters_dtype(params_dtype):
    x, kernel, bias, g = inputs("two axes", jnp.float32, params_dtype)
    _, (dx, dkernel, dbias) = value_and_vjp(lambda *a: dense(*a, backend="xla"), (x, kernel, bias), g)
    assert (dx.dtype, dkernel.dtype, dbias.dtype) == (jnp.float32, kernel.dtype, bias.dtype)
    expected = oracles.dense_layer(oracles.Unquantized(), x, kernel, bias, g)
    assert_close(dkernel, expected["kernel"], TOLERANCE[params_dtype])
    assert_close(dbias, expected["bias"], TOLERANCE[params_dtype])


def test_no_bias_and_a_single_vector():
    x, kernel, _, g = inputs("two axes", jnp.float32, bias=False)
    y, (dx, dkernel, dbias) = value_and_vjp(lambda *a: dense(*a, backend="xla"), (x[0], kernel, None), g[0])
    assert dbias is None
    assert_close(y, wide(x)[0] @ wide(kernel), TOLERANCE["float32"])
    assert_close(dx, wide(kernel) @ wide(g)[0], TOLERANCE["float32"])
    assert_close(dkernel, np.outer(wide(x)[0], wide(g)[0]), TOLERANCE["float32"])


FORMATS = {Format.HYBRID: (oracles.E4M3, oracles.E5M2), Format.E4M3: (oracles.E4M3, oracles.E4M3)}
SCALES = {"x": 64.0, "kernel": 200.0, "grad": 1500.0}


def quantized_call(recipe_kind, fmt, x, kernel, bias, g, *, jit=True):
    """Value and gradients by the op, and the oracle's."""
    fwd, bwd = FORMATS[fmt]
    if recipe_kind == "current":
        recipe, state, oracle = Float8CurrentScaling(fp8_format=fmt), None, oracles.Scales(fwd, bwd)
    else:  # a state that was at work: the scales follow from its histories
        recipe = DelayedScaling(fp8_format=fmt, amax_history_len=3)
        limits = {"x": 448.0, "kernel": 448.0, "grad": oracles.FP8_MAX[bwd]}
        state = {
            role: {"scale": jnp.float32(1), "amax_history": jnp.array([0.0, limits[role] / SCALES[role], 0.0])}
            for role in ROLES
        }
        exact = {
            r: oracles.scale_from_amax(np.asarray(state[r]["amax_history"][1]), bwd if r == "grad" else fwd)
            for r in ROLES
        }
        oracle = oracles.Scales(fwd, bwd, fixed=exact)

    def run(x, k, b, s):
        return dense(x, k, b, recipe=recipe, state=s, backend="xla")

    y, gradients = value_and_vjp(run, (x, kernel, bias, state), g, jit=jit)
    return (
        y,
        gradients,
        oracles.dense_layer(oracle, x, kernel, None if bias is None else bias.astype(x.dtype), g),
        oracle,
    )


@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize(
    ("fmt", "dtype", "shapes"),
    [
        (Format.HYBRID, dtype, shapes)
        for dtype in ("float32", "bfloat16")
        for shapes in ("two axes", "several output axes")
    ]
    + [(Format.E4M3, "float32", "batch and sequence")],
)
def test_fp8_multiplies_what_numpy_quantized(recipe, fmt, dtype, shapes):
    x, kernel, bias, g = inputs(shapes, dtype)
    y, (dx, dkernel, dbias, next_state), expected, oracle = quantized_call(recipe, fmt, x, kernel, bias, g)
    # As tight as an unquantized GEMM: the quantized operands are the same bits, and XLA left them in FP8.
    assert_close(y, expected["y"], TOLERANCE[dtype], what="y")
    assert_close(dx, expected["x"], ONE_ROUNDING[dtype], what="dx")
    assert_close(dkernel, expected["kernel"], TOLERANCE["float32"], what="dkernel")
    assert_close(dbias, expected["bias"], TOLERANCE["float32"], what="dbias")
    if recipe == "current":
        assert next_state is None
        return
    for role in ROLES:
        assert_bitwise(next_state[role]["scale"], np.float32(oracle.fixed[role]), what=role)
        was_in_slot_1 = np.float32(oracles.FP8_MAX[oracle.bwd if role == "grad" else oracle.fwd] / SCALES[role])
        assert_bitwise(next_state[role]["amax_history"], np.float32([oracle.seen[role], 0.0, was_in_slot_1]), what=role)


def test_quantization_matters_at_this_tolerance():
    """The check above would fail for a GEMM of unquantized operands by four orders of magnitude."""
    x, kernel, bias, g = inputs("two axes", jnp.float32)
    y, (dx, dkernel, *_), _, _ = quantized_call("current", Format.HYBRID, x, kernel, bias, g)
    plain = oracles.dense_layer(oracles.Unquantized(), x, kernel, bias, g)
    for actual, key in ((y, "y"), (dx, "x"), (dkernel, "kernel")):
        with pytest.raises(AssertionError, match=r"relative L2 distance 0.0"):
            assert_close(actual, plain[key], 1e4 * TOLERANCE["float32"])


@pytest.mark.costly("current")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_eager_and_jit_agree(recipe):
    x, kernel, bias, g = inputs("batch and sequence", jnp.float32)
    eager = quantized_call(recipe, Format.HYBRID, x, kernel, bias, g, jit=False)[:2]
    jitted = quantized_call(recipe, Format.HYBRID, x, kernel, bias, g)[:2]
    for ours, expected in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert_close(ours, expected, TOLERANCE["float32"])


def test_delayed_scaling_over_steps_follows_transformer_engine():
    recipe = DelayedScaling(amax_history_len=2)
    x, kernel, _, g = inputs("two axes", jnp.float32, bias=False)
    state = init_gemm_state(recipe)
    theirs = {
        role: oracles.TransformerEngineHistory(oracles.E5M2 if role == "grad" else oracles.E4M3, 2) for role in ROLES
    }
    for step in range(4):
        tensors = {"x": x * 2.0**step, "kernel": kernel * (1.0 + step), "grad": g * 3.0 ** (-step)}
        fixed = {role: theirs[role].use(oracles.amax(tensors[role])) for role in ROLES}

        def run(x, k, s):
            return dense(x, k, recipe=recipe, state=s, backend="xla")

        y, (dx, dkernel, state) = value_and_vjp(run, (tensors["x"], tensors["kernel"], state), tensors["grad"])
        expected = oracles.dense_layer(
            oracles.Scales(fixed=fixed), tensors["x"], tensors["kernel"], None, tensors["grad"]
        )
        for actual, key in ((y, "y"), (dx, "x"), (dkernel, "kernel")):
            assert_close(actual, expected[key], TOLERANCE["float32"], what=f"{key}, step {step}")
        for role in ROLES:
            assert_bitwise(state[role]["scale"], fixed[role], what=f"{role}, step {step}")


def test_bad_shapes():
    x, kernel = jnp.ones((2, 8, 16)), jnp.ones((16, 8))
    with pytest.raises(
        ValueError,
        match=r"dense: input \(2, 8, 16\) and kernel \(8, 16\) do not go together; they must be \[..., k\] and \[k, ",
    ):
        dense(x, kernel.T)
    with pytest.raises(ValueError, match="do not go together"):
        dense(x, jnp.ones(16))
    with pytest.raises(ValueError, match=r"bias \(16,\) must have the kernel's output shape \(8,\)"):
        dense(x, kernel, jnp.ones(16))


@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "message"),
    [
        ((2, 8, 24), (24, 16), r"input size 24 must be a multiple of 16 \(the next is 32\)"),
        ((16, 16), (16, 3, 7), r"output size 21 must be a multiple of 16 \(the next is 32\)"),
    ],
)
def test_sizes_that_fp8_gemms_do_not_take(x_shape, kernel_shape, message):
    with pytest.raises(ValueError, match=message + r".*autocast\(None\)"):
        dense(jnp.ones(x_shape), jnp.ones(kernel_shape), recipe=Float8CurrentScaling())
    assert dense(jnp.ones(x_shape), jnp.ones(kernel_shape)).shape == (*x_shape[:-1], *kernel_shape[1:])
