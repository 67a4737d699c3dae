"""Numbers of tokens that a recipe's GEMMs do not take: zeros inside of the op, which nothing outside sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import Activation, LinearOptions, LinearWeights, MlpOptions, dense, layernorm_mlp, quantize_kernel
from jax_te.quantize import init_gemm_state
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jax_te.sharding import constrain
from tests.support.meshes import MODES, use_mesh
from tests.support.numerics import assert_bitwise, draw, quick_jit
from tests.support.states import merging

DELAYED = DelayedScaling(amax_history_len=2)
RECIPES = [
    DELAYED,
    Float8CurrentScaling(),
    MXFP8BlockScaling(),
    pytest.param(NVFP4BlockScaling(), marks=pytest.mark.slow),
    pytest.param(Float8BlockScaling(), marks=pytest.mark.slow),
]


def with_gradients(recipe, x, kernel, bias, g, **options):
    """The output, and the gradients of input, kernel, bias and state."""

    def call(x, kernel, bias, state):
        return dense(x, kernel, bias, recipe=recipe, state=merging(state), **options)

    y, pullback = jax.vjp(call, x, kernel, bias, init_gemm_state(recipe))
    return y, pullback(g)


@pytest.mark.costly("delayed", slow=("mxfp8",))
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_it_is_what_padding_by_hand_gives(recipe):
    x, kernel, bias, g = draw("x", (3, 4, 32)), draw("k", (32, 2, 16)), draw("b", (2, 16)), draw("g", (3, 4, 2, 16))
    rows = ((0, recipe.alignment - 12), (0, 0))
    by_hand = jnp.pad(x.reshape(12, 32), rows), jnp.pad(g.reshape(12, 2, 16), (*rows, (0, 0)))
    run = quick_jit(lambda x, g: with_gradients(recipe, x, kernel, bias, g))
    y, (dx, dkernel, dbias, state) = run(x, g)
    padded, (dpadded, *expected) = run(*by_hand)
    assert_bitwise(y, padded[:12].reshape(y.shape), what="output")
    assert_bitwise(dx, dpadded[:12].reshape(x.shape), what="input gradient")
    assert_bitwise(dkernel, expected[0], what="kernel gradient")
    jax.tree.map(assert_bitwise, state, expected[2])
    # The order of the sum over rows differs with their number.
    np.testing.assert_allclose(dbias, expected[1], rtol=2e-6, atol=1e-6)


def test_cached_kernels_and_saved_inputs_are_padded_alike():
    recipe, x, kernel, g = Float8CurrentScaling(), draw("x", (12, 32)), draw("k", (32, 16)), draw("g", (12, 16))
    plain, (_, dkernel, *_) = with_gradients(recipe, x, kernel, None, g)
    _, (_, again, *_) = with_gradients(recipe, x, kernel, None, g, options=LinearOptions(save_original_input=True))
    assert_bitwise(again, dkernel)
    assert_bitwise(dense(x, quantize_kernel(kernel, recipe=recipe), recipe=recipe), plain)


def test_biases_in_front_of_a_gemm_do_not_reach_its_amax():
    # In rows of zeros the norm would give 5 and the activation 7; the input's own rows give less than 1.5.
    x = draw("x", (12, 16)).at[:, 0].set(-100.0)
    ln_bias, wi_bias = jnp.zeros(16).at[0].set(5.0), jnp.full((1, 16), 7.0)
    wi = jnp.zeros((16, 1, 16)).at[1:].set(0.0).at[0].set(60.0)
    options = MlpOptions(activation=Activation("relu"))

    def loss(states):
        first, second = (
            LinearWeights(kernel, bias, state)
            for kernel, bias, state in zip((wi, jnp.ones((16, 16))), (wi_bias, None), merging(states), strict=True)
        )
        y = layernorm_mlp(x, jnp.ones(16), ln_bias, first, second, options=options, recipe=DELAYED)
        return y.sum()

    states = quick_jit(jax.grad(loss))((init_gemm_state(DELAYED), init_gemm_state(DELAYED)))
    amaxes = [float(state["x"]["amax_history"][0]) for state in states]
    assert 0.5 < amaxes[0] < 1.5
    normed = (x[:, 0] - x.mean(axis=1)) / jnp.sqrt(x.var(axis=1) + 1e-5) + 5.0
    largest = float(jnp.maximum(60.0 * normed + 7.0, 0.0).max())
    assert abs(amaxes[1] / largest - 1.0) < 2.0**-4  # E4M3 rounds the norm's output by 2^-4 of it


@pytest.mark.parametrize("tokens", [16, 12])
def test_tokens_that_fit_are_not_padded(tokens):
    x, kernel = jnp.ones((tokens, 32)), jnp.ones((32, 16))
    run = jax.vjp(lambda x: dense(x, kernel, recipe=Float8CurrentScaling()), x)[1]
    text = str(jax.make_jaxpr(lambda x: dense(x, kernel, recipe=Float8CurrentScaling()))(x))
    text += str(jax.make_jaxpr(run)(jnp.ones((tokens, 16))))
    assert ("pad[" in text) == (tokens == 12)


SEQUENCE, WHOLE = ("batch", "sequence_parallel", "hidden"), Float8CurrentScaling(amax_scope="whole")
LAYERS = {
    "column": LinearOptions(kernel_axes=("fsdp", "ffn"), out_axes=("batch", "sequence", "ffn")),
    "column behind an all-gather": LinearOptions(SEQUENCE, ("fsdp", "ffn"), ("batch", "sequence", "ffn")),
    "row": LinearOptions(("batch", "sequence", "ffn"), ("ffn_fsdp", None), SEQUENCE),
}


@pytest.mark.costly(
    "explicit-row-current",
    slow=(
        "explicit-column behind an all-gather-delayed",
        "auto-row-delayed",
        "auto-column behind an all-gather-current",
    ),
)
@pytest.mark.wide(
    "auto-column behind an all-gather-current",
    "auto-row-delayed",
    "explicit-column behind an all-gather-delayed",
    "explicit-column behind an all-gather-current",
    "explicit-row-current",
)
@pytest.mark.parametrize("recipe", [DELAYED, WHOLE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_each_device_of_a_mesh_pads_its_tokens(mode, layer, recipe):
    """Where its part alone is not a multiple: 48 tokens in 4 parts of 12."""
    x, kernel, bias, options = draw("x", (4, 12, 32)), draw("k", (32, 32)), draw("b", (32,)), LAYERS[layer]
    g = draw("g", (4, 12, 32))
    expected = with_gradients(recipe, x, kernel, bias, g)
    with use_mesh(mode):
        g = constrain(g, options.out_axes)
        run = functools.partial(with_gradients, recipe, options=options)
        text = str(jax.make_jaxpr(run)(x, kernel, bias, g))
        assert "shard_map" in text
        # Those of input and gradient.
        assert text.count("pad[") >= 2
        found = quick_jit(run)(x, kernel, bias, g)
        cached = quantize_kernel(kernel, recipe=recipe, kernel_axes=options.kernel_axes, state=init_gemm_state(recipe))
        y = quick_jit(lambda x: dense(x, cached, bias, recipe=recipe, state=init_gemm_state(recipe), options=options))(
            x
        )
    assert_bitwise(y, found[0])
    for actual, value in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # Devices sum in another order than one: some roundings of fp32.
        np.testing.assert_allclose(actual, value, rtol=2.0**-18, atol=2.0**-18 * np.abs(value).max())


def test_a_mesh_without_tokens():
    x, kernel, options = jnp.zeros((4, 0, 32)), draw("k", (32, 32)), LAYERS["column"]
    with use_mesh("auto"):
        y, (dx, dkernel, *_) = quick_jit(
            lambda x, kernel: with_gradients(WHOLE, x, kernel, None, jnp.zeros((4, 0, 32)), options=options)
        )(x, kernel)
    assert y.shape == dx.shape == (4, 0, 32)
    assert not np.any(dkernel)


def test_parts_of_the_batch_with_scales_of_their_own_are_not_padded():
    parts = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), init_gemm_state(DELAYED))
    with pytest.raises(ValueError, match=r"token count \(with a scale for each part of the batch\) 12 must be"):
        dense(jnp.ones((4, 3, 32)), jnp.ones((32, 16)), recipe=DELAYED, state=parts)


@pytest.mark.costly("delayed", "mxfp8")
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=lambda recipe: getattr(recipe, "name", "none"))
def test_zero_tokens(recipe):
    weights = draw("wi", (32, 1, 32)), draw("wo", (32, 32))
    states = tuple(init_gemm_state(recipe) for _ in weights)

    def call(x, scale, weights, states):
        layers = [LinearWeights(kernel, None, state) for kernel, state in zip(weights, merging(states), strict=True)]
        return layernorm_mlp(x, scale, None, *layers, recipe=recipe)

    def run(*args):
        y, pullback = jax.vjp(call, *args)
        return y, pullback(jnp.ones_like(y))

    y, (dx, dscale, dweights, new) = quick_jit(run)(jnp.zeros((2, 0, 32)), jnp.ones(32), weights, states)
    assert y.shape == dx.shape == (2, 0, 32)
    assert not any(np.any(gradient) for gradient in (dscale, *dweights))
    for state, kernel in zip(new, weights, strict=True):
        if state is not None:
            assert {float(state[role]["scale"]) for role in ("x", "kernel", "grad")} == {1.0}
            assert not np.any(state["x"]["amax_history"])
            assert not np.any(state["grad"]["amax_history"])
            assert float(state["kernel"]["amax_history"][0]) == float(jnp.abs(kernel).max())
