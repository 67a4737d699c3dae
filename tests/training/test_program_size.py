"""Sizes of the programs that JAX lowers, which decide how long XLA compiles them."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te import value_and_grad
from jax_te.layers import Linear
from jax_te.quantize import write_back
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step


def _count(program, pattern):
    """Return how often a pattern is in a lowered program. A function that is called several times counts once."""
    return len(re.findall(pattern, program.as_text()))


def _program_of_write_back(states, platform):
    state = [{"scale": jnp.ones(()), "amax_history": jnp.zeros(4)} for _ in range(states)]
    return jax.jit(write_back).trace(state, state).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_further_states_need_no_further_kernels(platform):
    """XLA compiles a kernel for each slice of a stack at another offset: there are those of one stack, whatever is
    the number of states."""
    slices = [_count(_program_of_write_back(states, platform), r"stablehlo\.slice\b") for states in (32, 64)]
    assert slices[0] == slices[1]


def test_cpus_write_states_without_stacks():
    """XLA for CPUs compiles a kernel for each slice of a stack, and one for all states by themselves."""
    assert _count(_program_of_write_back(32, "cpu"), r"stablehlo\.concatenate\b") == 0


def _program_of_step(layers, size, tx):
    """Return the program of a train step of a sum of layers."""
    state = create_train_state(
        lambda rngs: nnx.List([Linear(size, size, rngs=rngs) for _ in range(layers)]), tx, key=jax.random.key(0)
    )
    step = make_train_step(lambda model, x, key: sum(jnp.sum(layer(x)) for layer in model), tx)
    return step.lower(state, jnp.ones((16, size)))


def test_the_check_for_finite_gradients_has_one_operation_for_all_parameters():
    """XLA for GPUs compiles a reduction of each large array, and takes longest to decide what to fuse it with."""
    tests = [_count(_program_of_step(layers, 256, optax.sgd(0.1)), r"stablehlo\.is_finite\b") for layers in (1, 3)]
    assert tests[0] == tests[1] > 0


def test_the_update_selects_between_no_arrays():
    """A conditional holds the update: a selection for each array would be compiled with all other operations."""
    selections = [_count(_program_of_step(layers, 16, optax.adam(0.1)), r"stablehlo\.select\b") for layers in (1, 3)]
    assert selections[0] == selections[1]


def _program_of_layers(recipe, layers):
    """Return the program of the loss and the gradients of a chain of layers."""

    def loss(model, x):
        for layer in model:
            x = layer(x)
        return jnp.sum(x)

    with autocast(recipe):
        model = nnx.List([Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(layers)])
        return nnx.jit(value_and_grad(loss)).lower(model, jnp.ones((16, 16)))


@pytest.mark.slow
def test_delayed_scaling_adds_fewer_operations_than_current_scaling():
    """What the histories take, in each further layer, is less than what a current scale takes."""
    operations = []
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        # Both have whole stacks of states, so the difference is what layers add to the functions that all of them call.
        few, many = (_count(_program_of_layers(recipe, layers), r"stablehlo\.\w+|\bcall @") for layers in (8, 16))
        operations.append(many - few)
    delayed, current = operations
    assert delayed <= current
