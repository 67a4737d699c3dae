"""States of delayed scaling in a step, which computes scales and histories of many layers at once, are those of layers
that are called one by one."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te import value_and_grad
from jax_te.layers import Linear
from jax_te.quantize import QuantizerState, as_float32, frozen_scales, with_max_gradients, write_back
from jax_te.recipe import DelayedScaling, Format, ModuleRecipe, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import assert_bitwise

RECIPE = DelayedScaling(amax_history_len=3, margin=1)
OWN = DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
# Of a larger amax, of zeros, which say nothing of a scale, of one that is not finite, and of others again.
FACTORS = (1.0, 8.0, 0.0, jnp.inf, 0.5, 0.25, 0.125, 2.0)
TX = optax.set_to_zero()  # so that parameters are those of the loop by hand


def make_model(rngs):
    """Return two layers under the ambient recipe, and one whose own has another rule and other dtypes."""
    layers = [Linear(16, 16, rngs=rngs) for _ in range(3)]
    layers[1].module_recipe = ModuleRecipe(training=OWN)
    return nnx.List(layers)


def loss_fn(model, x, key=None):
    for layer in model:
        x = layer(x)
    return jnp.sum(x**2)


def batches():
    x = jax.random.normal(jax.random.key(1), (16, 16))
    return [x * factor for factor in FACTORS]


def states_by_hand(xs):
    """Return the states after each batch, from derivatives of the loss itself."""
    graphdef, states, rest = nnx.split(make_model(nnx.Rngs(0)), QuantizerState, ...)

    @jax.jit
    def step(states, x):
        def loss(states, rest):
            return loss_fn(nnx.merge(graphdef, states, rest), x)

        gradient, others = jax.grad(loss, argnums=(0, 1), allow_int=True)(with_max_gradients(states), rest)
        numbers = jax.tree.leaves((loss(states, rest), others, as_float32(gradient)))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(number)) for number in numbers]))
        return write_back(states, gradient, keep_old=~finite)

    found = []
    for x in xs:
        states = step(states, x)
        found.append(states)
    return found


def states_of_train_steps(xs):
    state = create_train_state(lambda rngs: make_model(nnx.Rngs(0)), TX, key=jax.random.key(0))
    step = make_train_step(loss_fn, TX)
    found = []
    for x in xs:
        state, _ = step(state, x)
        found.append(jax.tree.map(jnp.copy, state.quantizers))  # the next step donates them
    return found


def states_of_a_loop(xs):
    model = make_model(nnx.Rngs(0))
    step = nnx.jit(lambda model, x: value_and_grad(loss_fn)(model, x))
    found = []
    for x in xs:
        step(model, x)
        found.append(jax.tree.map(jnp.copy, nnx.state(model, QuantizerState)))  # the Variables are the model's
    return found


def assert_same_states(ours, others):
    ours, others = nnx.to_flat_state(ours), dict(nnx.to_flat_state(others))
    assert len(ours) == len(others)
    for path, variable in ours:
        assert_bitwise(variable.get_value(), others[path].get_value(), what=path)


@pytest.fixture(params=["cpu", "gpu"])
def form(request, monkeypatch):
    """Whether states are computed one by one, as for CPUs, or in stacks, as for GPUs."""
    if request.param == "gpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))


@pytest.mark.parametrize("states_of", [states_of_train_steps, states_of_a_loop])
def test_states_are_those_of_layers_called_one_by_one(states_of, form):
    xs = batches()
    with autocast(RECIPE):
        for ours, by_hand in zip(states_of(xs), states_by_hand(xs), strict=True):
            assert_same_states(ours, by_hand)


@pytest.mark.parametrize("within_the_loss", [False, True])
def test_frozen_states_keep_their_bits(within_the_loss):
    def frozen_loss(model, x, key):
        with frozen_scales():
            return loss_fn(model, x)

    with autocast(RECIPE):
        state = create_train_state(make_model, TX, key=jax.random.key(0))
        for x in batches()[:2]:
            state, _ = make_train_step(loss_fn, TX)(state, x)
        before = jax.tree.map(jnp.copy, state.quantizers)
        step = make_train_step(frozen_loss if within_the_loss else loss_fn, TX)
        with contextlib.nullcontext() if within_the_loss else frozen_scales():
            state, _ = step(state, 4.0 * batches()[0])
    assert_same_states(state.quantizers, before)


def test_microbatches_have_the_states_of_one_batch(form):
    """Of the first layer's input and of kernels, whose amaxes do not depend on the number of rows."""
    found = []
    with autocast(RECIPE):
        for microbatches in (1, 2):
            state = create_train_state(make_model, TX, key=jax.random.key(0))
            step = make_train_step(loss_fn, TX, microbatches=microbatches)
            for factor in (1.0, 4.0):
                state, _ = step(state, jnp.full((16 * microbatches, 16), factor))
            states = dict(nnx.to_flat_state(state.quantizers))
            found.append({path: value for path, value in states.items() if "grad" not in path})
    assert_same_states(*map(nnx.from_flat_state, found))
