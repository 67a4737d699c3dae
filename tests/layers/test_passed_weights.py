"""Layers without parameters of their own: weights and biases are given to each call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.layers import LayerNormLinear, Linear
from jax_te.layers.model_kernels import quantizable_kernels
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import assert_bitwise, draw, value_and_vjp
from tests.support.reference import parameters, randomize

K, N = 32, 64
RECIPES = [None, DelayedScaling(amax_history_len=2), Float8CurrentScaling(), Float8BlockScaling()]
KINDS = {"Linear": Linear, "LayerNormLinear": LayerNormLinear}


@pytest.mark.costly("delayed-LayerNormLinear", slow=("block-LayerNormLinear", "current-Linear"))
@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "none" if r is None else r.name)
def test_a_layer_given_its_weights_is_the_layer_that_has_them(kind: str, recipe: Any) -> None:
    x, g = draw("x", (2, 16, K)), draw("g", (2, 16, N))
    with autocast(recipe):
        own = randomize(KINDS[kind](K, N, rngs=nnx.Rngs(0)))
        bare = KINDS[kind](K, N, skip_weight_param_allocation=True, rngs=nnx.Rngs(0))
        assert parameters(bare).keys() == (set() if kind == "Linear" else {"scale", "ln_bias"})
        if isinstance(own, LayerNormLinear):
            bare.scale[...], bare.ln_bias[...] = own.scale.get_value(), own.ln_bias.get_value()
        values = (own.kernel.get_value(), own.bias.get_value())
        y, (d_own, dx) = value_and_vjp(lambda layer, x: layer(x), (own, x), g)
        y_bare, (d_bare, dx_bare, dweight, dbias) = value_and_vjp(
            lambda layer, x, w, b: layer(x, w, bias=b), (bare, x, *values), g
        )
    assert_bitwise(y_bare, y)
    assert_bitwise(dx_bare, dx)
    assert_bitwise(dweight, d_own.kernel.get_value())
    assert_bitwise(dbias, d_own.bias.get_value())
    assert (d_own.quantizers is None) == (recipe is None or not recipe.has_state)
    jax.tree.map(assert_bitwise, d_bare.quantizers, d_own.quantizers)


def test_a_passed_weight_is_kept_between_microbatches() -> None:
    x, layer = draw("x", (16, K)), Linear(K, N, False, skip_weight_param_allocation=True, rngs=nnx.Rngs(0))
    weight = draw("w", (K, N))
    with autocast(Float8CurrentScaling()):
        first = layer(x, weight, is_first_microbatch=True)
        assert_bitwise(layer(x, jnp.zeros_like(weight), is_first_microbatch=False), first)

        def loss(weight: jax.Array, first: bool | None) -> jax.Array:
            return jnp.sum(jnp.sin(layer(x, weight, is_first_microbatch=first)))

        assert_bitwise(jax.grad(loss)(weight, False), jax.grad(loss)(weight, None))


def test_a_passed_weight_goes_before_the_layers_own() -> None:
    x, layer = draw("x", (16, K)), Linear(K, N, rngs=nnx.Rngs(0))
    weight, bias = draw("w", (K, N)), draw("b", (N,))
    with autocast(Float8CurrentScaling()):
        other = Linear(K, N, rngs=nnx.Rngs(1))
        other.kernel[...], other.bias[...] = weight, bias
        layer(x, is_first_microbatch=True)  # what is kept is the layer's own kernel, and not used
        for first in (None, False):
            assert_bitwise(layer(x, weight, bias, first), other(x))
        d_layer, d_weight = jax.grad(lambda layer, w: jnp.sum(jnp.sin(layer(x, w))), (0, 1))(layer, weight)
    assert not d_layer.kernel.get_value().any()
    assert np.abs(d_weight).max() > 0.0


def test_bias_is_required_where_it_is_added_or_returned() -> None:
    x, weight, bias = draw("x", (4, K)), draw("w", (K, N)), draw("b", (N,))
    build = lambda **options: Linear(K, N, skip_weight_param_allocation=True, rngs=nnx.Rngs(0), **options)  # noqa: E731
    for layer in (build(), build(bias=False, return_bias=True)):
        with pytest.raises(ValueError, match=r"has no parameters .*: call it with bias=, \(64,\)"):
            layer(x, weight)
    y, returned = build(return_bias=True)(x.astype(jnp.bfloat16), weight, bias)
    assert_bitwise(returned, bias.astype(jnp.bfloat16))
    assert_bitwise(y, build(bias=False)(x.astype(jnp.bfloat16), weight))


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind: str) -> None:
    x, weight = draw("x", (4, K)), draw("w", (K, N))
    bare = KINDS[kind](K, N, bias=False, skip_weight_param_allocation=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has no parameters .*: call it with weight=, \(32, 64\)"):
        bare(x)
    with pytest.raises(ValueError, match=r"weight must have shape \(32, 64\), \[in, \*out\], got \(64, 32\)"):
        bare(x, weight.T)
    with pytest.raises(ValueError, match="built with bias=False and adds none"):
        bare(x, weight, draw("b", (N,)))
    with pytest.raises(ValueError, match=r"bias must have shape \(64,\), got \(32,\)"):
        KINDS[kind](K, N, rngs=nnx.Rngs(0))(x, weight, draw("b", (K,)))


class Tied(nnx.Module):
    """Two layers with one kernel, the second of which has none of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = Linear(K, K, False, params_dtype=jnp.bfloat16, fuse_wgrad_accumulation=True, rngs=rngs)
        self.second = Linear(K, K, False, skip_weight_param_allocation=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)), self.first.kernel[...])


@pytest.mark.costly
def test_tied_kernels_train() -> None:
    def loss(model: Tied, x: jax.Array, key: Any) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    with autocast(DelayedScaling(amax_history_len=2)):
        state = create_train_state(Tied, optax.adam(1e-2), key=jax.random.key(0))
        assert [path for path, _, _ in quantizable_kernels(state.model)] == [("first", "kernel")]
        step, losses = make_train_step(loss, optax.adam(1e-2), microbatches=2), []
        for _ in range(8):
            state, metrics = step(state, draw("x", (32, K)))
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    assert state.model.first.fuse_wgrad_accumulation
    for layer in (state.model.first, state.model.second):  # both have seen the kernel, each has its own state
        assert layer.quantizers["kernel"]["amax_history"][0] > 0.0
        assert layer.quantizers["grad"]["amax_history"][0] > 0.0
