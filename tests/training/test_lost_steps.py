"""A step with inf or nan in it is lost under every recipe and in every loop, and the run goes on as if without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_te.linen as te
from jax_te import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.layers import Linear
from jax_te.ops import dense
from jax_te.quantize import as_float32, init_gemm_state, with_max_gradients, write_back
from jax_te.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.training import (
    DynamicLossScale,
    Optimizer,
    create_train_state,
    make_train_step,
    value_and_grad,
)
from tests.support.toy import assert_same

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "most recent": DelayedScaling(amax_history_len=1),
    "current": Float8CurrentScaling(),
    "current, powers of two": Float8CurrentScaling(use_power_2_scales=True),
    "block": Float8BlockScaling(),
    "block, any scale": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
X = jax.random.normal(jax.random.key(0), (32, 32), jnp.bfloat16)
ONE = jnp.float32(1.0)
Batch = tuple[jax.Array, jax.Array]
"""The input, and a factor of the gradient that comes back to the model."""

GOOD: list[Batch] = [(X, ONE), (2 * X, ONE), (X[::-1], ONE)]
LOST: list[Batch] = [
    (X.at[3, 5].set(jnp.inf), ONE),
    (X.at[3, 5].set(-jnp.inf), ONE),
    (X.at[3, 5].set(jnp.nan), ONE),
    (X, jnp.float32(jnp.inf)),
    (X, jnp.float32(jnp.nan)),
]
WITH_LOST = [GOOD[0], *LOST[:3], GOOD[1], *LOST[3:], GOOD[2]]


@jax.custom_vjp
def times_in_backward(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return ``x``, whose gradient is multiplied."""
    return x


times_in_backward.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (g * factor.astype(g.dtype), jnp.zeros_like(factor))
)


def loss_of(call: Callable[..., Any], batch: Batch) -> jax.Array:
    y = times_in_backward(call(batch[0]), batch[1])
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def build(rngs: nnx.Rngs) -> Linear:
    return Linear(32, 32, bias=False, rngs=rngs)


def losses_of_train_step(batches: list[Batch]) -> tuple[list[Any], Any]:
    tx = optax.adam(1e-2)
    state = create_train_state(build, tx, key=jax.random.key(0))
    step = make_train_step(lambda model, batch, key: loss_of(model, jax.tree.map(lambda x: x[0], batch)), tx)
    losses = []
    for given in batches:
        state, metrics = step(state, jax.tree.map(lambda x: x[None], given))
        assert bool(metrics["skipped"]) == any(given is lost for lost in LOST)
        losses.append(metrics["loss"])
    return losses, (state.params, state.opt_state, state.quantizers)


def losses_of_optimizer(batches: list[Batch]) -> tuple[list[Any], Any]:
    model = build(nnx.Rngs(0))
    optimizer = Optimizer(model, optax.adam(1e-2))

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        loss, grads = value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [train(model, optimizer, batch) for batch in batches]
    assert optimizer.skipped_steps[...] == len(batches) - len(GOOD)
    return losses, (nnx.state(model), optimizer.opt_state)


def losses_of_linen(batches: list[Batch]) -> tuple[list[Any], Any]:
    layer = te.Linear(32, 32, bias=False)
    variables = nn.unbox(layer.init(jax.random.key(0), X))
    tx = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 100)
    state = TrainState.create(apply_fn=layer.apply, params=variables, tx=tx)

    @jax.jit
    def train(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        loss, grads = te.value_and_grad(lambda params: loss_of(lambda x: layer.apply(params, x), batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for batch in batches:
        state, loss = train(state, batch)
        losses.append(loss)
    return losses, (state.params, state.opt_state.inner_state)


LOOPS = {"train step": losses_of_train_step, "optimizer": losses_of_optimizer, "linen": losses_of_linen}


RECIPES_OF_EACH_LOOP = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
CASES = [(recipe, loop) for recipe in RECIPES for loop in LOOPS if recipe in RECIPES_OF_EACH_LOOP or loop == "linen"]


@pytest.mark.costly(
    "mxfp8-optimizer",
    "current-train step",
    "current, powers of two-linen",
    "delayed-optimizer",
    slow=(
        "mxfp8-linen",
        "nvfp4-linen",
        "mxfp8-train step",
        "delayed-linen",
        "block-train step",
        "delayed-train step",
        "most recent-linen",
        "nvfp4-optimizer",
        "nvfp4-train step",
        "block, any scale-linen",
        "block-linen",
        "none-linen",
        "current-linen",
        "current-optimizer",
        "none-train step",
        "block-optimizer",
    ),
)
@pytest.mark.parametrize(("recipe", "loop"), CASES)
def test_it_is_as_if_the_batch_had_not_been_there(recipe, loop):
    with autocast(RECIPES[recipe]):
        losses, after = LOOPS[loop](WITH_LOST)
        expected, expected_after = LOOPS[loop](GOOD)
    lost = [any(batch is bad for bad in LOST) for batch in WITH_LOST]
    assert [loss for loss, bad in zip(losses, lost, strict=True) if not bad] == expected
    for loss, batch in zip(losses, WITH_LOST, strict=True):
        if any(batch is bad for bad in LOST[:3]):
            assert not np.isfinite(loss)
    assert_same(after, expected_after)


class Normed(nnx.Module):
    """Batch statistics and random numbers, which a step changes beside its parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = Linear(32, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(self.first(x))))


def normed_loss(model: Any, batch: Any, key: Any = None) -> jax.Array:
    x, added = batch
    return jnp.mean(jnp.square(model(x))) + added[0]


@pytest.mark.wide("none")
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_other_state_stays_as_in_a_train_step(recipe):
    """Also where the loss is not finite and its gradients are."""
    x, zeros = X.astype(jnp.float32), jnp.zeros(32)
    infinite = x.at[0, 0].set(jnp.inf)
    batches = [(x, zeros), (infinite, zeros), (x[::-1], zeros), (x, zeros.at[0].set(jnp.inf)), (2 * x, zeros)]
    tx, scaler = optax.adam(1e-2), DynamicLossScale(initial_scale=16.0, hysteresis=1)

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = value_and_grad(normed_loss, scaler=optimizer.scaler)(model, batch)
        optimizer.update(model, grads)
        return loss

    with autocast(RECIPES[recipe]):
        model = Normed(nnx.Rngs(0))
        state = create_train_state(model, tx, key=jax.random.key(0), scaler=scaler)
        optimizer, step = Optimizer(model, tx, scaler=scaler), make_train_step(normed_loss, tx)
        for batch in batches:
            loss = train(model, optimizer, batch)
            state, metrics = step(state, batch)
            np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
    assert optimizer.skipped_steps[...] == state.skipped_steps == 2
    assert optimizer.scaler.scale == state.scaler.scale == 4.0
    assert model.dropout.rngs.count[...] == state.model.dropout.rngs.count[...] == 3
    np.testing.assert_allclose(model.norm.var[...], state.model.norm.var[...], rtol=1e-6)
    assert np.isfinite(model.norm.var[...]).all()


def test_intermediates_of_a_lost_step_are_returned():
    """Before the step they have no value of that shape, so that nothing can be kept."""

    class Seeing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen = nnx.Intermediate(x)
            return jnp.mean(self.layer(x))

    model = Seeing(nnx.Rngs(0))
    for x in (jnp.full((2, 4), jnp.inf), jnp.ones((2, 4)), jnp.full((3, 4), jnp.inf)):
        value_and_grad(lambda model, x: model(x))(model, x)
        np.testing.assert_array_equal(model.seen[...], x)


def test_both_look_at_all_gradients():
    """Where the part that an optimizer updates is finite, and another is not."""
    model = nnx.Dict(one=nnx.Param(jnp.ones(2)), other=nnx.Param(jnp.ones(2)))
    optimizer = Optimizer(model, optax.sgd(1.0), wrt=lambda path, variable: "one" in path)

    def loss_fn(model: Any) -> jax.Array:
        return jnp.sum(model["one"][...]) + jnp.sum(times_in_backward(model["other"][...], jnp.float32(jnp.inf)))

    _, grads = value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    assert optimizer.skipped_steps[...] == 1
    assert model["one"][...].tolist() == [1.0, 1.0]


@pytest.mark.costly("False")
@pytest.mark.parametrize("told", [False, True])
def test_a_loss_that_the_optimizer_is_told_counts(told):
    """Of gradients from Flax's own derivative, which says nothing of a loss that is not finite."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, optax.with_extra_args_support(optax.sgd(1.0)))
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(jnp.ones((1, 2)))) + jnp.inf)(model)
    optimizer.update(model, grads, **({"value": loss} if told else {}))
    assert optimizer.skipped_steps[...] == int(told)


@pytest.mark.costly("inf")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_states_that_are_given_as_gradients_count(bad):
    """As a loop of one's own may give them, which merges them; all gradients are finite but an amax."""
    with autocast(RECIPES["delayed"]):
        model = build(nnx.Rngs(0))
        optimizer = Optimizer(model, optax.sgd(1.0))
        before = jax.tree.map(lambda x: x, nnx.state(model))
        grads = jax.tree.map(jnp.ones_like, before)
        (path, amaxes), *_ = [entry for entry in nnx.to_flat_state(grads) if entry[0][-1] == "amax_history"]
        amaxes.set_value(amaxes.get_value().at[0].set(bad))
        optimizer.update(model, grads)
    assert optimizer.skipped_steps[...] == 1, path
    assert_same(nnx.state(model), before)


@pytest.mark.costly("inf")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_microbatch_loses_its_step(bad):
    tx, x = optax.sgd(0.1), jnp.stack([X, X.at[0, 0].set(bad)]).reshape(64, 32)
    with autocast(RECIPES["delayed"]):
        state = create_train_state(build, tx, key=jax.random.key(0))
        step = make_train_step(lambda model, x, key: jnp.mean(jnp.square(model(x))), tx, microbatches=2)
        before = jax.tree.map(jnp.copy, (state.params, state.quantizers))
        state, metrics = step(state, x)
    assert np.isnan(metrics["loss"])
    assert metrics["skipped"] == 1
    assert_same((state.params, state.quantizers), before)


@pytest.mark.parametrize("written", ["as it is", "by write_back"])
def test_a_loop_by_hand_is_not_frozen(written):
    """Without a check, and without `write_back`, too."""
    recipe = DelayedScaling(amax_history_len=8)
    state, w = init_gemm_state(recipe), jnp.ones((32, 32), jnp.bfloat16)

    @jax.jit
    def after(state: Any, x: jax.Array) -> Any:
        run = lambda state: jnp.sum(dense(x, w, recipe=recipe, state=state).astype(jnp.float32))  # noqa: E731
        gradient = jax.grad(run, allow_int=True)(with_max_gradients(state))
        return as_float32(gradient) if written == "as it is" else write_back(state, gradient)

    ones = jnp.ones((32, 32), jnp.bfloat16)
    for x in (ones, ones.at[0, 0].set(jnp.inf), ones.at[0, 0].set(jnp.nan), 64 * ones):
        state = after(state, x)
        if written == "by write_back":
            assert np.isfinite(state["x"]["amax_history"]).all()
    assert after(state, ones)["x"]["scale"] == 448.0 / 64
    assert np.isfinite(after(after(state, ones), ones)["x"]["amax_history"]).all()
