"""Delayed scaling under ``jax.vmap``: calls that share a state have one next state, with the largest amax of all."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_te.linen as te
from jax_te import create_train_state, make_train_step, value_and_grad
from jax_te.config import RouterOptions
from jax_te.layers import LayerNormMLP, Linear, TransformerLayer, quantize_model
from jax_te.quantize import QuantizerState, as_float32, frozen_scales, with_max_gradients, write_back
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import split_model
from tests.support.numerics import draw

RECIPE = DelayedScaling(amax_history_len=4)
X = draw("x", (2, 3, 16, 32)) * jnp.linspace(1.0, 6.0, 6).reshape(2, 3, 1, 1)
# Sums of other shapes differ in their last bits; 16 rows of 32 features are summed at most.
CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-4)
STATE = "_overwrite_with_gradient"
RATES: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYERS = {
    "Linear": lambda rngs: Linear(32, 32, rngs=rngs),
    "LayerNormMLP": lambda rngs: LayerNormMLP(32, 64, rngs=rngs),
    "TransformerLayer": lambda rngs: TransformerLayer(32, 64, 2, **RATES, rngs=rngs),
    "quantize_model": lambda rngs: plain(rngs),
}


@pytest.fixture(autouse=True)
def recipe():
    with autocast(RECIPE):
        yield


def plain(rngs):
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 32, rngs=rngs))
    quantize_model(model, X[0, 0], rules={"*": "ambient"})
    return model


def states_after(build, call, steps=3):
    """Return the states after some steps of ``call(model, x [6, 16, 32])``."""
    model = build(nnx.Rngs(0))
    step = nnx.jit(value_and_grad(lambda model, x: jnp.mean(call(model, x) ** 2)))
    for _ in range(steps):
        loss, _ = step(model, X.reshape(6, 16, 32))
        assert np.isfinite(loss)
    return nnx.to_pure_dict(nnx.state(model, QuantizerState))


CALLS = {
    "vmap": lambda model, x: jax.vmap(lambda x: model(x[None])[0])(x),
    "vmap of vmap": lambda model, x: jax.vmap(jax.vmap(lambda x: model(x[None])[0]))(x.reshape(2, 3, 16, 32)),
    "nnx.vmap": lambda model, x: nnx.vmap(lambda model, x: model(x[None])[0], in_axes=(None, 0))(model, x),
    "vmap of remat": lambda model, x: jax.vmap(jax.checkpoint(lambda x: model(x[None])[0]))(x),
    "remat of vmap": lambda model, x: jax.checkpoint(jax.vmap(lambda x: model(x[None])[0]))(x),
    "vmap of scan": lambda model, x: jax.vmap(lambda x: jax.lax.map(lambda x: model(x[None])[0], x))(
        x.reshape(2, 3, 16, 32)
    ),
}


@pytest.mark.costly(
    "quantize_model-remat of vmap",
    "Linear-vmap of vmap",
    slow=(
        "LayerNormMLP-remat of vmap",
        "Linear-vmap of remat",
        "Linear-vmap of scan",
        "TransformerLayer-nnx.vmap",
        "TransformerLayer-remat of vmap",
        "Linear-vmap",
        "quantize_model-vmap of remat",
        "LayerNormMLP-vmap of remat",
        "LayerNormMLP-vmap of vmap",
        "quantize_model-vmap of vmap",
        "quantize_model-vmap of scan",
        "LayerNormMLP-vmap of scan",
        "LayerNormMLP-vmap",
        "TransformerLayer-vmap of vmap",
        "quantize_model-vmap",
        "TransformerLayer-vmap of remat",
        "TransformerLayer-vmap of scan",
        "TransformerLayer-vmap",
        "Linear-nnx.vmap",
        "LayerNormMLP-nnx.vmap",
        "quantize_model-nnx.vmap",
    ),
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_states_are_those_of_one_call(build, call):
    expected = states_after(build, lambda model, x: model(x))
    jax.tree.map(CLOSE, states_after(build, call), expected)


def test_layers_with_a_state_each_keep_theirs():
    stack = nnx.vmap(lambda key: Linear(32, 32, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    value_and_grad(lambda stack: jnp.mean(nnx.vmap(lambda layer, x: layer(x))(stack, X[0]) ** 2))(stack)
    newest = stack.quantizers["x"]["amax_history"][:, 0]
    np.testing.assert_array_equal(newest, jnp.max(jnp.abs(X[0]), axis=(1, 2)))


def test_an_amax_that_is_not_finite_shows():
    layer = Linear(32, 32, rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(layer, QuantizerState))
    loss, _ = value_and_grad(lambda layer: jnp.mean(jax.vmap(layer)(X[0].at[1, 2, 3].set(jnp.nan)) ** 2))(layer)
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer, QuantizerState)), before)


def test_frozen_scales_stay():
    layer = Linear(32, 32, rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(layer, QuantizerState))
    with frozen_scales():
        value_and_grad(lambda layer: jnp.mean(jax.vmap(layer)(X[0]) ** 2))(layer)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer, QuantizerState)), before)


@pytest.mark.costly("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_train_step(microbatches):
    def trained(call):
        tx = optax.sgd(1e-2)
        state = create_train_state(LAYERS["LayerNormMLP"], tx, key=jax.random.key(0))
        step = make_train_step(lambda model, x, key: jnp.mean(call(model, x) ** 2), tx, microbatches=microbatches)
        for _ in range(3):
            state, _ = step(state, X.reshape(6, 16, 32))
        return nnx.to_pure_dict(state.quantizers), nnx.to_pure_dict(state.params)

    jax.tree.map(
        functools.partial(CLOSE, atol=1e-5),
        trained(lambda model, x: jax.vmap(model)(x)),
        trained(lambda model, x: model(x)),
    )


def test_a_functional_loop():
    graphdef, params, quantizers, rest = split_model(Linear(32, 32, rngs=nnx.Rngs(0)))

    def loss(params, quantizers):
        return jnp.mean(jax.vmap(nnx.merge(graphdef, params, quantizers, rest))(X[0]) ** 2)

    _, next_states = jax.grad(loss, argnums=(0, 1), allow_int=True)(params, with_max_gradients(quantizers))
    states = write_back(quantizers, as_float32(next_states))
    assert float(states["quantizers"]["x"]["amax_history"][0]) == float(jnp.max(jnp.abs(X[0])))


@pytest.mark.costly("jax.vmap-jax", slow=("jax.vmap-te",))
@pytest.mark.parametrize("derivative", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
@pytest.mark.parametrize("shared", [False, True], ids=["jax.vmap", "nn.vmap"])
def test_in_linen(derivative, shared):
    layer = te.Linear(32, 32)
    variables = layer.init(jax.random.key(0), X[0, 0])
    if shared:
        none = {"params": None, STATE: None}
        mapped = nn.vmap(te.Linear, variable_axes=none, split_rngs={"params": False})(32, 32)  # pyright: ignore[reportArgumentType]
        call = mapped.apply
    else:

        def call(variables, x):
            return jax.vmap(lambda x: layer.apply(variables, x))(x)

    step = jax.jit(derivative(lambda variables: jnp.mean(call(variables, X[0]) ** 2)))
    _, gradients = step(variables)
    found = gradients[STATE]["quantizers"]["x"]
    assert float(found["amax_history"][0]) == float(jnp.max(jnp.abs(X[0])))
    assert float(found["scale"]) == 1.0


@pytest.mark.costly("vmap of vmap-te", slow=("vmap-te", "vmap-jax"))
@pytest.mark.parametrize("derivative", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
@pytest.mark.parametrize("nested", [False, True], ids=["vmap", "vmap of vmap"])
def test_a_router_in_linen_counts_the_tokens_of_all_calls(derivative, nested):
    router = te.Router(32, RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True))
    variables = nn.unbox(router.init(jax.random.key(0), X[0, 0]))

    def next_states(call, x):
        return jax.jit(derivative(lambda variables: jnp.sum(call(variables, x) ** 2)))(variables)[1][STATE]

    def once(variables, x):
        return router.apply(variables, x).probs

    mapped = jax.vmap(once, in_axes=(None, 0))
    if nested:
        found = next_states(jax.vmap(mapped, in_axes=(None, 0)), X)
    else:
        found = next_states(mapped, X.reshape(6, 16, 32))
    expected = next_states(once, X.reshape(96, 32))
    assert np.any(expected["expert_bias"])
    np.testing.assert_array_equal(found["expert_bias"], expected["expert_bias"])
