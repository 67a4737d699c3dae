"""A train step passes a state's arrays alone, and what a user reads and changes is the same as without that."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import StateArrays, create_train_state, make_train_step
from tests.support.toy import Toy, assert_same, loss_fn, make_batch

TX = optax.adamw(1e-3)


def half_toy(rngs):
    return Toy(rngs, jnp.bfloat16, dropout=0.1)


def new_state():
    return create_train_state(half_toy, TX, key=jax.random.key(5))


@pytest.fixture(scope="module", autouse=True)
def delayed():
    with autocast(DelayedScaling(amax_history_len=4)):
        yield


@pytest.fixture(scope="module")
def step(delayed):
    return make_train_step(loss_fn, TX)


def variables():
    gc.collect()
    return sum(issubclass(type(each), nnx.Variable) for each in gc.get_objects())


def test_a_call_makes_no_variables(step):
    state = step(new_state(), make_batch(0))[0]
    before = variables()
    state = step(state, make_batch(1))[0]
    assert int(state.step) == 2
    assert variables() == before
    assert len(nnx.to_flat_state(state.params)) == variables() - before
    assert state.params is state.params


def test_a_state_is_the_same_pytree_as_before_a_step(step):
    start = new_state()
    structure, paths = jax.tree.structure(start), [path for path, _ in jax.tree.leaves_with_path(start)]
    state = step(start, make_batch(0))[0]
    assert jax.tree.structure(state) == structure
    assert [path for path, _ in jax.tree.leaves_with_path(state)] == paths
    assert state.graphdef == start.graphdef


def test_variables_that_a_user_changes_are_the_next_steps():
    frozen = make_train_step(loss_fn, optax.set_to_zero())
    state = create_train_state(half_toy, optax.set_to_zero(), key=jax.random.key(5))
    state = frozen(state, make_batch(0))[0]
    state.params["bias"].set_value(jnp.full_like(state.params["bias"][...], 3.0))
    state = frozen(state, make_batch(1))[0]
    assert float(state.params["bias"][...].min()) == 3.0


def test_the_program_of_a_call_is_the_one_that_lower_shows(step):
    """To the byte, with the names of arguments and results, so that a compile cache has it once."""
    state, batch = new_state(), make_batch(0)
    assert step.lower(StateArrays.of(state), batch).as_text() == step.lower(state, batch).as_text()


def test_a_program_that_was_compiled_ahead_takes_the_state_of_a_step(step):
    compiled = step.lower(new_state(), make_batch(0)).compile()
    ahead, metrics = compiled(step(new_state(), make_batch(0))[0], make_batch(1))
    called, same = step(step(new_state(), make_batch(0))[0], make_batch(1))
    assert_same(ahead, called)
    assert_same(metrics, same)


def test_steps_in_a_loop_of_jax_are_those_of_single_calls(step):
    batches = [make_batch(index) for index in range(3)]
    state = new_state()
    for batch in batches:
        state = step(state, batch)[0]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *batches)
    looped, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(new_state(), stacked)
    assert int(looped.step) == len(metrics["loss"]) == 3
    assert jax.tree.structure(looped) == jax.tree.structure(state)


def test_variables_first_read_inside_a_trace_are_not_that_traces(step):
    state = step(new_state(), make_batch(0))[0]
    jax.jit(lambda: state.params["bias"][...] + 1.0)()
    state.params["bias"].set_value(jnp.zeros_like(state.params["bias"][...]))


DUPLICATES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda state: pickle.loads(pickle.dumps(state))}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
def test_copies_have_all_fields(step, duplicate):
    state = step(new_state(), make_batch(0))[0]
    other = duplicate(state)
    assert set(vars(other)) == {field.name for field in dataclasses.fields(state)}
    assert_same(jax.tree.leaves(other), jax.tree.leaves(state))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_name_that_a_state_does_not_have_raises(step, steps):
    state = new_state()
    for _ in range(steps):
        state = step(state, make_batch(0))[0]
    name = "parameters"
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'parameters'"):
        getattr(state, name)
