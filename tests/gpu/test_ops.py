"""Every op on the GPU: TE's kernels against XLA, forward, gradients and next states.

Tolerances, as relative L2 distances:

- bf16 without a recipe: tensors between two GEMMs are rounded in other places; each rounding errs by 2^-9 at most,
  2^-9/√3 in the mean, and no more than about ten add up.
- fp32 without a recipe: XLA's GEMMs with TF32 operands (11 significant bits: 2^-11 for each operand).
- FP8 `dense`: the same FP8 operands on both sides; what differs is the accumulation (TE's forward GEMM accumulates in
  about 14 bits) and the rounding of the result.
- Activations with a kink: both backends' norms round some values to another neighbour, which moves few of the values
  that are activated from one side of a kink to the other: 5 of 10,000 at 0, seen on an H200. Such a value's gradient is
  all error, so the gradients' distance is about √(2 · 5e-4) = 0.032 with relu, where half of the gradients are 0. That
  the activation itself is the same bit for bit is tested beside it.
- FP8 behind a norm or activation: see tests/te/test_backends.py, 0.062 for one GEMM with an E5M2 operand. The MLP's
  first GEMM gets its gradient through a second one, so two such errors add: 0.062 √2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ACTIVATIONS, ActivationParams
from jax_te.ops import NormSpec, activation, dense
from jax_te.quantize import ROLES
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.support.calls import layernorm_mlp
from tests.support.cases import make_case
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp

pytestmark = pytest.mark.gpu

SIZES = {"b": 2, "s": 64, "h": 128, "f": 256, "n": 2, "groups": 1, "d": 64}
RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed E4M3": DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3),
}
GEMM_CASES = ("dense", "layernorm_dense", "layernorm_mlp gelu", "layernorm_mlp swiglu")
CALLS = [(name, recipe, "bfloat16") for name in GEMM_CASES for recipe in ("none", "current", "delayed")]
CALLS += [
    (name, recipe, "float32") for name in ("dense", "layernorm_mlp gelu") for recipe in ("none", "current", "delayed")
]
CALLS += [("dense row", "delayed E4M3", "bfloat16")]
CALLS += [
    (name, "none", "bfloat16") for name in ("layernorm", "layernorm rmsnorm", "activation gelu", "activation swiglu")
]
CALLS += [("layernorm", "none", "float32")]


def tolerance(name, recipe, dtype):
    if recipe == "none" or name.startswith("dense"):
        return 0.01 if dtype == "bfloat16" else 0.003
    return 0.09


def both(name, recipe, dtype, args=None, states=None, g=None):
    case = make_case(name, **SIZES).astype(dtype)
    recipe = RECIPES[recipe]

    def on(backend):
        def run(args, states):
            return case.run(args, states, recipe=recipe, backend=backend)

        return quick_jit(lambda *a: with_vjp(run, *a))((case.args, case.states(recipe)), case.g)

    return on("te"), on("xla")


@pytest.mark.parametrize(("name", "recipe", "dtype"), CALLS)
def test_te_against_xla(name, recipe, dtype):
    (y, (gradients, states)), (expected_y, (expected, expected_states)) = both(name, recipe, dtype)
    limit = tolerance(name, recipe, dtype)
    assert y.dtype == expected_y.dtype == jnp.dtype(dtype)
    distances = {"y": relative_l2(y, expected_y)}
    for key, gradient in expected.items():
        if gradient is not None:
            assert (gradients[key].dtype, gradients[key].shape) == (gradient.dtype, gradient.shape), key
            distances[key] = relative_l2(gradients[key], gradient)
    assert max(distances.values()) < limit, distances
    assert jax.tree.structure(states) == jax.tree.structure(expected_states)
    exact = name.startswith("dense")
    for state, wanted in zip(jax.tree.leaves(states), jax.tree.leaves(expected_states), strict=True):
        np.testing.assert_allclose(state, wanted, rtol=0.0 if exact else 0.1, err_msg=str(distances))


@pytest.mark.parametrize("name", ["dense", "layernorm_dense", "layernorm_mlp gelu"])
def test_fp32_is_not_rounded_where_jax_is_told_so(name):
    """TE's own GEMM would round operands to TF32, 2^-11, whatever the precision is."""
    with jax.default_matmul_precision("highest"):
        results = both(name, "none", "float32")
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_l2(one, other) < 256 * 2**-24  # a sum of at most 256 products, in another order


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name, recipe):
    """Between two GEMMs; under delayed scaling TE's kernels write what they activate and differentiate in FP8."""
    b, s, h, f = (SIZES[key] for key in "bshf")
    parts, chosen = len(ACTIVATIONS[name]), RECIPES[recipe]
    params = ActivationParams(limit=1.5, alpha=1.2, linear_offset=0.5) if name == "clamped_swiglu" else None
    x, g = draw("x", (b, s, h), jnp.bfloat16), draw("g", (b, s, h), jnp.bfloat16, scale=0.1)
    args = (draw("wi", (h, parts, f), scale=0.1), draw("wi_bias", (parts, f)), draw("wo", (f, h), scale=0.1))
    states = make_case("layernorm_mlp gelu", **SIZES).states(chosen)

    def on(backend):
        def run(x, wi, wi_bias, wo, states):
            return layernorm_mlp(
                x, jnp.ones(h), None, wi, wi_bias, wo, None, norm=NormSpec(kind="rmsnorm"), activation=name,
                activation_params=params, recipe=chosen, states=states, backend=backend,
            )  # fmt: skip

        y, (*gradients, _) = quick_jit(lambda *a: with_vjp(run, *a))((x, *args, states), g)
        return y, gradients

    (y, gradients), (expected_y, wanted) = on("te"), on("xla")
    limit = tolerance("layernorm_mlp", recipe, "bfloat16")
    assert relative_l2(y, expected_y) < limit
    kinked = any(part in ("relu", "clamped_linear", "clamped_silu") for part in ACTIVATIONS[name])
    for actual, e in zip(gradients, wanted, strict=True):
        assert relative_l2(actual, e) < (max(limit, 0.04) if kinked else limit)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_alone_is_the_same(name):
    params = ActivationParams(limit=1.5, alpha=1.2, linear_offset=0.5) if name == "clamped_swiglu" else None
    z = draw("z", (2, 64, len(ACTIVATIONS[name]), 256), jnp.bfloat16)
    g = draw("g", (2, 64, 256), jnp.bfloat16)
    results = []
    for backend in ("te", "xla"):

        def run(z, backend=backend):
            return activation(z, name, params=params, backend=backend)

        results.append(quick_jit(lambda z, g, run=run: with_vjp(run, (z,), g))(z, g))
    for actual, e in zip(*map(jax.tree.leaves, results), strict=True):
        # Both compute in fp32, where tanh and exp may differ in the last bits, and round once: one step of bf16, 2^-7.
        np.testing.assert_allclose(actual.astype(jnp.float32), e.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_delayed_scaling_over_steps():
    """The scales of three steps follow from amaxes that TE's kernels report."""
    case, recipe = make_case("layernorm_mlp gelu", **SIZES).astype(jnp.bfloat16), RECIPES["delayed"]
    steps, states = {}, {}
    for backend in ("te", "xla"):

        def run(args, states, backend=backend):
            return case.run(args, states, recipe=recipe, backend=backend)

        steps[backend] = quick_jit(lambda args, states, g, run=run: with_vjp(run, (args, states), g))
        states[backend] = case.states(recipe)
    for i in range(3):
        args = {**case.args, "x": case.args["x"] * (1.0 + i)}
        g = (case.g.astype(jnp.float32) * 3.0**-i).astype(jnp.bfloat16)
        y = {}
        for backend, step in steps.items():
            y[backend], (_, states[backend]) = step(args, states[backend], g)
        assert relative_l2(y["te"], y["xla"]) < 0.062, f"step {i}"
        for layer, role in np.ndindex(2, 3):
            ours, wanted = (states[backend][layer][ROLES[role]] for backend in ("te", "xla"))
            for key in ("scale", "amax_history"):
                np.testing.assert_allclose(ours[key], wanted[key], rtol=0.1, err_msg=f"step {i} {layer} {ROLES[role]}")


def test_wgrad_of_fp32_parameters_is_not_rounded_to_bf16():
    case = make_case("dense", **SIZES).astype(jnp.bfloat16)
    for recipe in (None, RECIPES["current"]):

        def run(args, recipe=recipe):
            return case.run(args, recipe=recipe, backend="te")

        _, (gradients,) = quick_jit(lambda args, g, run=run: with_vjp(run, (args,), g))(case.args, case.g)
        kernel = gradients["kernel"]
        assert float(jnp.mean(kernel == kernel.astype(jnp.bfloat16).astype(jnp.float32))) < 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", [(1024, 64, 96), (33, 7, 5), (2048, 256, 384)])
def test_wgrad_of_16_bit_operands_in_fp32_is_that_of_fp64(sizes, dtype):
    rows, k, n = sizes
    x, g = (jax.random.normal(jax.random.key(i), (rows, size), dtype) for i, size in enumerate((k, n)))

    def wgrad(x, g):
        _, vjp = jax.vjp(lambda kernel: dense(x, kernel, backend="te"), jnp.zeros((k, n)))
        return vjp(g)[0]

    # Forward's result is not asked for, but its GEMM is in the program before XLA sees it.
    assert jax.jit(wgrad).lower(x, g).as_text().count("te_gemm_v2_ffi") == 2
    gradient = wgrad(x, g)
    assert gradient.dtype == jnp.float32
    wanted = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    # Elements are sums of `rows` products of about 1. Tensor cores add in fp32 with some bits less, and cuBLAS may add
    # up parts of the rows by themselves: 1.7e-4 was seen at 1024 rows.
    np.testing.assert_allclose(gradient, wanted, atol=2**-16 * np.sqrt(rows), rtol=0)


@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_gradient_of_one_token(params_dtype):
    """TE's GEMM would have no axis to contract."""
    x, g = (jax.random.normal(jax.random.key(i), (size,), jnp.bfloat16) for i, size in enumerate((32, 48)))
    _, (gradient,) = with_vjp(lambda w: dense(x, w, backend="te"), (jnp.ones((32, 48), params_dtype),), g)
    wanted = np.outer(np.asarray(x, np.float64), np.asarray(g, np.float64))
    np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, rtol=float(jnp.finfo(params_dtype).eps))
