"""Mixtures of experts in Linen: the NNX layer's numbers, and states whose gradients are their next values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jax_te import layers
from jax_te.config import RouterOptions
from jax_te.errors import QuantizerStateError
from jax_te.linen import MoE, value_and_grad
from jax_te.quantize import QuantizerState, write_back
from tests.support.numerics import draw

X = draw("x", (2, 8, 16))
OPTIONS = RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.5)
STATE = "_overwrite_with_gradient"


@pytest.mark.costly
def test_states_go_on_as_in_nnx():
    layer, same = MoE(16, 32, OPTIONS), layers.MoE(16, 32, OPTIONS, rngs=nnx.Rngs(0))
    variables = layer.init(jax.random.key(0), X)
    params = nnx.to_pure_dict(nnx.state(same, nnx.Param))
    variables = {STATE: variables[STATE], "params": params}
    np.testing.assert_array_equal(layer.apply(variables, X), same(X))

    grads = nnx.grad(lambda same: jnp.sum(same(X) ** 2), argnums=nnx.DiffState(0, (nnx.Param, QuantizerState)))(same)
    states = nnx.state(same, QuantizerState)
    expected = nnx.to_pure_dict(write_back(states, nnx.state(grads, QuantizerState)))
    assert np.any(expected["router"]["expert_bias"])
    for differentiate in (jax.value_and_grad, value_and_grad):
        _, found = differentiate(lambda variables: jnp.sum(layer.apply(variables, X) ** 2))(variables)
        jax.tree.map(np.testing.assert_array_equal, found[STATE], expected)
        np.testing.assert_allclose(found["params"]["router"]["kernel"], grads.router.kernel[...], rtol=1e-5)


@pytest.mark.costly
def test_flax_train_state_overwrites_it():
    layer = MoE(16, 32, OPTIONS)
    state = TrainState.create(apply_fn=layer.apply, params=layer.init(jax.random.key(0), X), tx=optax.sgd(0.1))
    _, grads = value_and_grad(lambda params: jnp.sum(layer.apply(params, X) ** 2))(state.params)
    state = state.apply_gradients(grads=grads)
    bias = np.asarray(state.params[STATE]["router"]["expert_bias"])
    assert set(np.abs(bias)) <= {0.0, 0.5}
    assert bias.any()
    with pytest.raises(QuantizerStateError, match="leaves its state out"):
        jax.grad(lambda p: jnp.sum(layer.apply({**state.params, "params": p}, X)))(state.params["params"])
    evaluated = lambda p: jnp.sum(layer.apply({**state.params, "params": p}, X, deterministic=True))  # noqa: E731
    jax.grad(evaluated)(state.params["params"])
