"""A layer with states of delayed scaling that trains without a recipe says so, unless that was asked for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, PipelineConfig, TransformerConfig
from jax_te.layers import Linear, MultiheadAttention, quantize_model
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, ModuleRecipe, autocast
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, create_train_state, make_eval_step, make_train_step, value_and_grad

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


@pytest.mark.costly("layer_of_flax-train_step", "own_layer-train_step")
@pytest.mark.parametrize("make", [train_step, own_loop])
@pytest.mark.parametrize("build", [own_layer, layer_of_flax])
def test_outside_of_autocast_it_warns_at_the_users_line(build: Any, make: Any) -> None:
    call = make(build)
    with pytest.warns(UserWarning, match="no recipe is in use") as found:
        call()
    assert {warning.filename for warning in found} == {__file__}


@pytest.mark.costly("layer_of_flax-own_loop", "layer_of_flax-train_step", "own_layer-train_step")
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


def never_quantized(layer: Linear) -> None:
    layer.module_recipe = ModuleRecipe(training=None)


def in_high_precision(layer: Linear) -> None:
    layer.high_precision = True


def in_evaluation(layer: Linear) -> None:
    layer.eval()


@pytest.mark.parametrize(
    "choose", [of_its_own, of_its_own_without_quantization, never_quantized, in_high_precision, in_evaluation]
)
def test_a_layer_with_a_choice_of_its_own_does_not(choose: Callable[[Linear], None]) -> None:
    def build(rngs: nnx.Rngs) -> Linear:
        layer = own_layer(rngs)
        choose(layer)
        return layer

    with warnings.catch_warnings(action="error"):
        own_loop(build)()


def test_a_recipe_of_its_own_that_only_replaces_an_ambient_one_is_no_choice() -> None:
    def build(rngs: nnx.Rngs) -> Linear:
        layer = own_layer(rngs)
        layer.module_recipe = ModuleRecipe(training=RECIPE)
        return layer

    with pytest.warns(UserWarning, match="no recipe is in use"):
        own_loop(build)()


PIPELINED = PipelinedLoss(
    embed_inputs=lambda model, batch, key: model.embed_inputs(batch[:, :-1]),
    compute_loss=lambda model, y, batch, key: model.compute_loss(y, batch[:, 1:]),
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_of_a_pipeline_warn(schedule: Any) -> None:
    rates: Any = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    sizes = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, **rates)
    build = functools.partial(GPTModel, sizes, vocab_size=32, max_sequence_length=16)
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2), devices=jax.devices()[:2])):
        with autocast(RECIPE):
            state = create_train_state(lambda rngs: build(rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
        pipeline = PipelineConfig(schedule=schedule)
        step = make_train_step(PIPELINED, optax.sgd(0.1), microbatches=2, pipeline=pipeline)
        with pytest.warns(UserWarning, match="no recipe is in use"):
            step(state, jnp.zeros((4, 17), jnp.int32))


@pytest.mark.costly
def test_attention_warns() -> None:
    with autocast(DelayedScaling(amax_history_len=2, fp8_dpa=True)):
        layer = MultiheadAttention(256, 2, attention_dropout=0.0, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 128, 256), jnp.bfloat16)
    with pytest.warns(UserWarning, match="no recipe is in use") as found:
        value_and_grad(lambda layer: jnp.mean(layer(x).astype(jnp.float32)))(layer)
    assert any("DotProductAttention has scales" in str(warning.message) for warning in found)


def test_evaluation_does_not() -> None:
    with autocast(RECIPE):
        state = create_train_state(own_layer, optax.sgd(0.1), key=jax.random.key(0))
    with warnings.catch_warnings(action="error"):
        make_eval_step(loss_of)(state, X)
