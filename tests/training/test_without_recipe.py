"""A step of a model with states of delayed scaling that no recipe reaches says so, unless that was asked for."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.layers import Linear
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step, value_and_grad

RECIPE = DelayedScaling(amax_history_len=2)
X = jnp.ones((16, 16))


def loss_of(model: Any, batch: jax.Array, key: Any = None) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def train_step(own: DelayedScaling | None = None) -> Any:
    def build(rngs: nnx.Rngs) -> Linear:
        layer = Linear(16, 16, rngs=rngs)
        layer.module_recipe = own
        return layer

    with autocast(RECIPE):
        state, tx = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0)), optax.sgd(0.1)
    step = make_train_step(loss_of, tx)
    return lambda: step(state, X)


def own_loop() -> Any:
    with autocast(RECIPE):
        model = Linear(16, 16, rngs=nnx.Rngs(0))
    return lambda: value_and_grad(lambda model: loss_of(model, X))(model)


@pytest.mark.parametrize("make", [train_step, own_loop])
def test_outside_of_autocast_it_warns(make: Any) -> None:
    call = make()
    with pytest.warns(UserWarning, match="no recipe is in use") as found:
        call()
    assert found[0].filename == __file__


@pytest.mark.parametrize("recipe", [RECIPE, None], ids=["recipe", "none, said"])
@pytest.mark.parametrize("make", [train_step, own_loop])
def test_inside_it_does_not(make: Any, recipe: Any) -> None:
    call = make()
    with autocast(recipe), warnings.catch_warnings(action="error"):
        call()


def test_a_recipe_of_the_layers_own_is_one() -> None:
    call = train_step(RECIPE)
    with warnings.catch_warnings(action="error"):
        call()
