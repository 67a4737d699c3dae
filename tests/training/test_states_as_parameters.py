"""Loops that hand an optimizer all Variables, states among them: they raise, or the next loss is nan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.errors import QuantizerStateError
from jax_te.layers import Router, quantize_model
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import Optimizer, value_and_grad

X = jax.random.normal(jax.random.key(0), (4, 16, 32))
OPTIMIZERS = [optax.sgd(0.1), optax.adam(1e-3), optax.adamw(1e-3, weight_decay=0.1)]


@pytest.fixture(autouse=True)
def as_users_run_optax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class TwoLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def loss_fn(model: Any) -> jax.Array:
    return jnp.mean((model(X) - 1.0) ** 2)


def quantized() -> nnx.Module:
    model = TwoLayers(nnx.Rngs(0))
    quantize_model(model, X, rules={"*": "ambient"})
    return model


def losses_of_all_variables(model: nnx.Module, loss: Callable[[Any], jax.Array], tx: Any, steps: int) -> list[float]:
    """Return the losses of a functional loop that trains all that ``nnx.split`` gives."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state, moments):
        value, gradients = jax.value_and_grad(lambda state: loss(nnx.merge(graphdef, state)))(state)
        updates, moments = tx.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value

    moments, losses = tx.init(state), []
    for _ in range(steps):
        state, moments, value = step(state, moments)
        losses.append(float(value))
    return losses


@pytest.mark.costly("sgd")
@pytest.mark.parametrize("tx", OPTIMIZERS, ids=["sgd", "adam", "adamw"])
def test_a_derivative_of_scales_and_amaxes_raises(tx):
    with autocast(DelayedScaling(amax_history_len=4)):
        with pytest.raises(QuantizerStateError, match="an optimizer would train it"):
            losses_of_all_variables(quantized(), loss_fn, tx, 1)
        with pytest.raises(QuantizerStateError, match="an optimizer would train it"):
            nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.Variable))(quantized())


@pytest.mark.costly(
    "adam-quantiles",
    "adamw-quantiles",
    slow=("adam-counts", "adam-expert bias", "adamw-counts", "sgd-quantiles", "sgd-expert bias", "sgd-counts"),
)
@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "sigmoid", "enable_expert_bias": True},
        {"load_balancing_type": "quantile_balancing"},
        {"load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.1},
    ],
    ids=["expert bias", "quantiles", "counts"],
)
@pytest.mark.parametrize("tx", OPTIMIZERS, ids=["sgd", "adam", "adamw"])
def test_counts_that_were_trained_make_the_loss_nan(options, tx):
    router = Router(32, RouterOptions(num_experts=4, topk=2, **options), rngs=nnx.Rngs(0))

    def loss(router: Router) -> jax.Array:
        return jnp.mean(router(X).probs ** 2)

    first, *others = losses_of_all_variables(router, loss, tx, 3)
    assert jnp.isfinite(first)
    assert all(map(jnp.isnan, others))
    # The loop that is right goes on.
    optimizer = Optimizer(router, tx)
    for _ in range(3):
        value, gradients = value_and_grad(loss)(router)
        optimizer.update(router, gradients)
    assert jnp.isfinite(value)
