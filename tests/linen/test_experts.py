"""Mixtures of experts in Linen: the NNX layer's numbers, and states whose gradients are their next values."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_te
from jax_te import layers
from jax_te.config import RouterOptions
from jax_te.errors import QuantizerStateError
from jax_te.linen import MoE, Router, aux_losses_scaled, to_nnx, value_and_grad
from jax_te.quantize import QuantizerState, write_back
from tests.support.numerics import draw

X = draw("x", (2, 8, 16))
OPTIONS = RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.5)
STATE = "_overwrite_with_gradient"


@pytest.mark.slow
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
        jax.tree.map(np.testing.assert_array_equal, found[STATE], {**expected, "uses": 1.0})
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


class Routers(nn.Module):
    """A router that is called twice, one that is evaluated, and one that is left out, each with another rate."""

    def setup(self):
        options = [dataclasses.replace(OPTIONS, bias_update_rate=rate) for rate in (0.5, 0.25, 0.125)]
        self.twice, self.evaluated, self.left_out = map(functools.partial(Router, 16), options)

    def __call__(self, x, everything=False):
        total = self.twice(x).probs + self.twice(2.0 * x).probs + self.evaluated(x, deterministic=True).probs
        return jnp.sum((total + self.left_out(x).probs if everything else total) ** 2)


def with_biases(states):
    """Biases that are not those of a new state."""
    return {
        name: {**state, "expert_bias": jnp.arange(4, dtype=jnp.float32) / (place + 3)}
        for place, (name, state) in enumerate(sorted(states.items()))
    }


@pytest.mark.costly
def test_calls_add_up_and_what_is_not_called_stays():
    model = Routers()
    variables = nn.unbox(jax.jit(functools.partial(model.init, everything=True))(jax.random.key(0), X))
    states = with_biases(variables[STATE])
    variables = {**variables, STATE: states}
    same = to_nnx(Router(16, OPTIONS), {"params": variables["params"]["twice"], STATE: states["twice"]})

    @nnx.jit
    def expected(router):
        jax_te.value_and_grad(lambda router: jnp.sum((router(X).probs + router(2.0 * X).probs) ** 2))(router)
        return nnx.to_pure_dict(nnx.state(router, QuantizerState))

    found = jax.jit(lambda variables: value_and_grad(lambda v: model.apply(v, X))(variables)[1][STATE])(variables)
    assert found["twice"].pop("uses") == 1.0
    jax.tree.map(np.testing.assert_array_equal, found["twice"], expected(same))
    assert np.any(found["twice"]["expert_bias"] != states["twice"]["expert_bias"])
    jax.tree.map(np.testing.assert_array_equal, found["left_out"], states["left_out"])
    np.testing.assert_array_equal(found["evaluated"]["expert_bias"], states["evaluated"]["expert_bias"])


def of_parts(applied):
    """A loss of two routers, each applied to its part of the variables."""

    def loss(variables):
        parts = [{name: tree[which] for name, tree in variables.items()} for which in ("a", "b")]
        return sum(jnp.sum(apply(part, X).probs ** 2) for apply, part in zip(applied, parts, strict=True))

    return loss


@pytest.mark.costly("False")
@pytest.mark.parametrize("jitted", [False, True])
def test_a_part_of_a_model_may_be_applied_by_itself(jitted):
    """Its layers' paths are the ends of the collection's. A trace from elsewhere, which has counted nothing, is new."""
    layer = Router(16, OPTIONS)
    one = nn.unbox(layer.init(jax.random.key(0), X))
    apply = jax.jit(layer.apply) if jitted else layer.apply
    apply(one, X)
    both = {name: {"a": tree, "b": tree} for name, tree in one.items()}
    found = value_and_grad(of_parts([apply, apply]))(both)[1][STATE]
    expected = value_and_grad(lambda one: jnp.sum(layer.apply(one, X).probs ** 2))(one)[1][STATE]
    for part in found.values():
        jax.tree.map(np.testing.assert_array_equal, part, expected)


def test_parts_whose_rules_cannot_be_told_apart_are_refused():
    layers = [Router(16, dataclasses.replace(OPTIONS, bias_update_rate=rate)) for rate in (0.5, 0.25)]
    one = nn.unbox(layers[0].init(jax.random.key(0), X))
    both = {name: {"a": tree, "b": tree} for name, tree in one.items()}
    with pytest.raises(ValueError, match="different rules for a/expert_bias"):
        value_and_grad(of_parts([layer.apply for layer in layers]))(both)
    renamed = {**one, STATE: {"bias": one[STATE]["expert_bias"], "last": one[STATE]["last_step"]}}

    def loss(variables):
        bias, last = (variables[STATE][name] for name in ("bias", "last"))
        return jnp.sum(layers[0].apply({**variables, STATE: {"expert_bias": bias, "last_step": last}}, X).probs)

    with pytest.raises(ValueError, match="no such state"):
        value_and_grad(loss)(renamed)


@pytest.mark.slow
def test_a_scan_counts_each_layer_by_itself():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + jnp.sum(Router(16, OPTIONS, name="router")(x).probs, -1, keepdims=True), None

    lifted = nn.remat(Body)
    model = nn.scan(
        lifted, variable_axes={"params": 0, STATE: 0}, split_rngs={"params": True}, length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()  # fmt: skip
    variables = nn.unbox(model.init(jax.random.key(0), X, None))

    def loss(variables):
        with aux_losses_scaled(jnp.float32(2.0)):
            return jnp.sum(model.apply(variables, X, None)[0] ** 2)

    (_, plain), (_, found) = (differentiate(loss)(variables) for differentiate in (jax.value_and_grad, value_and_grad))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, plain)
    assert found[STATE]["router"]["expert_bias"].shape == (2, 4)
