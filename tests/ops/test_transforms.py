"""Every op under scan, remat and vmap gives what it gives alone."""

import jax
import jax.numpy as jnp
import pytest

from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.cases import CASES, GEMM_CASES, make_case
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, quick_jit, with_vjp
from tests.support.states import merging

RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=2),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
WITH_RECIPES = [(name, "none") for name in CASES] + [
    (name, recipe) for name in GEMM_CASES[::2] for recipe in ("current", "delayed")
]
WITH_RECIPES += [("dense", "block"), ("layernorm_mlp gelu", "block"), ("dense", "nvfp4")]


def small(name, recipe="none"):
    sizes = {"s": 16, "h": 32} if recipe == "nvfp4" else {"s": 8, "h": 16}
    return make_case(name, b=2, f=32, n=2, groups=1, d=16, v=16, **sizes)


def assert_same(ours, expected, tolerance=TOLERANCE["float32"]):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for actual, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(actual, wanted, tolerance)


@pytest.mark.costly(
    "layernorm_mlp swiglu-none",
    slow=(
        "attention causal-none",
        "attention padding_causal packed-none",
        "dense-delayed",
        "layernorm_dense-current",
        "layernorm_mlp gelu-block",
    ),
)
@pytest.mark.wide(
    "dense-delayed",
    "dense row-none",
    "layernorm_dense-current",
    "layernorm_mlp gelu-block",
    "layernorm_mlp swiglu-none",
    "attention causal-none",
    "attention padding_causal packed-none",
    "softmax_cross_entropy-none",
)
@pytest.mark.parametrize(("name", "recipe"), WITH_RECIPES)
def test_scan(name, recipe):
    """A scan over two layers' arguments: outputs, gradients and next states are those of two calls."""
    case, recipe = small(name, recipe), RECIPES[recipe]
    one = case.args
    two = jax.tree.map(lambda a: a * 0.5 + 0.1, one)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, two)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), case.states(recipe))

    def run(a, s):
        return case.run(a, s, recipe=recipe)

    def scanned(args, states):
        return jax.lax.scan(lambda carry, layer: (carry, run(*layer)), (), (args, states))[1]

    ours = quick_jit(lambda *args: with_vjp(scanned, *args))((stacked, states), jnp.stack([case.g, case.g * 2.0]))
    layer = quick_jit(lambda *args: with_vjp(run, *args))
    alone = [layer((args, case.states(recipe)), g) for args, g in ((one, case.g), (two, case.g * 2.0))]
    assert_same(ours, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


@pytest.mark.costly(
    "attention padding-none",
    "layernorm_dense-delayed",
    slow=("layernorm_mlp swiglu-current", "layernorm_mlp gelu-block", "dense-nvfp4"),
)
@pytest.mark.wide(
    "dense-nvfp4",
    "layernorm_dense-delayed",
    "layernorm_mlp gelu-block",
    "layernorm_mlp swiglu-current",
    "attention padding-none",
    "activation swiglu-none",
    "softmax_cross_entropy-none",
)
@pytest.mark.parametrize(("name", "recipe"), WITH_RECIPES)
def test_remat(name, recipe):
    case, recipe = small(name, recipe), RECIPES[recipe]

    def run(a, s):
        return case.run(a, s, recipe=recipe)

    args = (case.args, case.states(recipe)), case.g
    plain = quick_jit(lambda *args: with_vjp(run, *args))(*args)
    remat = quick_jit(lambda *args: with_vjp(jax.checkpoint(run), *args))(*args)
    assert_same(remat, plain)


def test_remat_that_saves_only_named_tensors():
    case = small("layernorm_mlp gelu")
    policy = jax.checkpoint_policies.save_only_these_names("ffn1")
    plain = quick_jit(lambda *args: with_vjp(case.run, *args))((case.args,), case.g)
    named = quick_jit(lambda *args: with_vjp(jax.checkpoint(case.run, policy=policy), *args))((case.args,), case.g)
    assert_same(named, plain)


@pytest.mark.costly("layernorm_dense", "attention padding", slow=("layernorm_mlp swiglu",))
@pytest.mark.wide("dense row", "layernorm_dense", "layernorm_mlp swiglu", "attention padding", "softmax_cross_entropy")
@pytest.mark.parametrize("name", CASES)
def test_vmap(name):
    """Without a recipe, a mapped op is the op on each slice. (Under a recipe each slice has scales of its own: see
    below.)
    """
    case = small(name)
    batch = jax.tree.map(lambda a: jnp.stack([a, a * 0.5 + 0.1]), case.args)
    gs = jnp.stack([case.g, case.g * 2.0])

    def one(args, g):
        return with_vjp(case.run, (args,), g)

    ours = quick_jit(jax.vmap(one))(batch, gs)
    jitted = quick_jit(one)
    alone = [jitted(jax.tree.map(lambda leaf, i=i: leaf[i], batch), gs[i]) for i in range(2)]
    assert_same(ours, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


@pytest.mark.costly("nvfp4")
@pytest.mark.wide("delayed", "nvfp4")
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "none"])
def test_vmap_over_layers_gives_each_its_own_scales(recipe):
    """Layers of very different sizes: outputs, gradients, random bits and next states are those of each alone."""
    case, recipe = small("dense", "nvfp4"), RECIPES[recipe]
    layers = jax.tree.map(lambda a: jnp.stack([a, a * 100.0]), (case.args, case.states(recipe)))
    gs = jnp.stack([case.g, case.g * 1e-3])

    def one(args, state, g):
        return with_vjp(lambda *given: case.run(*given, recipe=recipe), (args, state), g)

    ours, jitted = quick_jit(jax.vmap(one))(*layers, gs), quick_jit(one)
    alone = [jitted(*jax.tree.map(lambda leaf, i=i: leaf[i], layers), gs[i]) for i in range(2)]
    for i in range(2):  # each by itself: beside the larger one, the smaller one's errors would not show
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], ours), alone[i])


def test_the_gradient_of_a_state_is_its_next_value_whatever_the_output_gradient_is():
    case, recipe = small("dense"), RECIPES["delayed"]
    state = case.states(recipe)
    _, vjp = jax.vjp(lambda s: case.run(case.args, merging(s), recipe=recipe), state)
    (next_state,) = vjp(case.g)
    assert jax.tree.structure(next_state) == jax.tree.structure(state)
    for leaf, before in zip(jax.tree.leaves(next_state), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (before.shape, before.dtype)
    (doubled,) = vjp(case.g * 2.0)
    assert_bitwise(doubled["x"]["amax_history"], next_state["x"]["amax_history"])
    assert_bitwise(doubled["grad"]["amax_history"][0], next_state["grad"]["amax_history"][0] * 2.0)
