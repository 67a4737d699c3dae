"""A layer with states of delayed scaling that trains without a recipe says so, unless that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.layers import Linear, quantize_model
from jax_te.recipe import DelayedScaling, ModuleRecipe, autocast
from jax_te.training import create_train_state, make_eval_step, make_train_step, value_and_grad

RECIPE = DelayedScaling(amax_history_len=2)
X = jnp.ones((16, 16))


def loss_of(model: Any, batch: jax.Array, key: Any = None) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def loss_under_recipe(model: Any, batch: jax.Array, key: Any = None) -> jax.Array:
    with autocast(RECIPE):
        return loss_of(model, batch)


def own_layer(rngs: nnx.Rngs) -> Any:
    return Linear(16, 16, rngs=rngs)


def layer_of_flax(rngs: nnx.Rngs) -> Any:
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs))  # the last is a head
    quantize_model(model, X)
    return model


def train_step(build: Callable[[nnx.Rngs], Any], loss: Any = loss_of) -> Callable[[], object]:
    with autocast(RECIPE):
        state = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0))
    step = make_train_step(loss, optax.sgd(0.1))
    return lambda: step(state, X)


def own_loop(build: Callable[[nnx.Rngs], Any], loss: Any = loss_of) -> Callable[[], object]:
    with autocast(RECIPE):
        model = build(nnx.Rngs(0))
    return lambda: value_and_grad(lambda model: loss(model, X))(model)


@pytest.mark.parametrize("make", [train_step, own_loop])
@pytest.mark.parametrize("build", [own_layer, layer_of_flax])
def test_outside_of_autocast_it_warns_at_the_users_line(build: Any, make: Any) -> None:
    call = make(build)
    with pytest.warns(UserWarning, match="no recipe is in use") as found:
        call()
    assert {warning.filename for warning in found} == {__file__}


@pytest.mark.parametrize("make", [train_step, own_loop])
@pytest.mark.parametrize("build", [own_layer, layer_of_flax])
def test_inside_it_does_not(build: Any, make: Any) -> None:
    """Be the context around the step, in the loss function, or one that says that there is no recipe."""
    for recipe in (RECIPE, None):
        call = make(build)
        with autocast(recipe), warnings.catch_warnings(action="error"):
            call()
    with warnings.catch_warnings(action="error"):
        make(build, loss_under_recipe)()


def of_its_own(layer: Linear) -> None:
    layer.module_recipe = RECIPE


def of_its_own_without_quantization(layer: Linear) -> None:
    layer.module_recipe = ModuleRecipe(training=None, override_nonquantized_autocast=True)


def in_high_precision(layer: Linear) -> None:
    layer.high_precision = True


@pytest.mark.parametrize("choose", [of_its_own, of_its_own_without_quantization, in_high_precision])
def test_a_layer_with_a_choice_of_its_own_does_not(choose: Callable[[Linear], None]) -> None:
    def build(rngs: nnx.Rngs) -> Linear:
        layer = own_layer(rngs)
        choose(layer)
        return layer

    with warnings.catch_warnings(action="error"):
        own_loop(build)()


def test_evaluation_does_not() -> None:
    with autocast(RECIPE):
        state = create_train_state(own_layer, optax.sgd(0.1), key=jax.random.key(0))
    with warnings.catch_warnings(action="error"):
        make_eval_step(loss_of)(state, X)
