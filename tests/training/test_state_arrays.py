"""A train step passes a state's arrays alone, and what a user reads and changes is the same as without that."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import StateArrays, TrainState, create_train_state, make_train_step
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


@pytest.mark.costly
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
    read = []
    jax.jit(lambda: read.append(state.params) or state.params["bias"][...] + 1.0)()
    assert state.params is read[0]
    state.params["bias"].set_value(jnp.zeros_like(state.params["bias"][...]))


def clear_bias(state):
    state.params["bias"].set_value(jnp.zeros_like(state.params["bias"][...]))
    return 0.0


def test_a_change_inside_a_function_that_jax_traces_is_refused(step):
    state = step(new_state(), make_batch(0))[0]
    with pytest.raises(TraceContextError, match="Cannot mutate Param from a different trace level"):
        jax.jit(lambda: clear_bias(state))()


def test_a_change_inside_a_branch_of_the_function_that_steps_is_refused(step):
    def stepped(state, batch):
        state = step(state, batch)[0]
        jax.lax.cond(state.step > 0, lambda: clear_bias(state), lambda: 0.0)
        return state

    with pytest.raises(TraceContextError, match="Cannot mutate Param from a different trace level"):
        jax.jit(stepped)(new_state(), make_batch(0))


def test_a_change_inside_the_function_that_steps_is_in_its_result(step):
    def stepped(state, batch):
        state = step(state, batch)[0]
        clear_bias(state)
        return state

    assert not jax.jit(stepped)(new_state(), make_batch(0)).params["bias"][...].any()


def test_arrays_that_a_user_replaces_are_freed(step):
    state = step(new_state(), make_batch(0))[0]
    replaced = weakref.ref(state.params["bias"].get_value())
    clear_bias(state)
    gc.collect()
    assert replaced() is None


def test_the_second_of_two_threads_that_read_a_field_takes_the_first_ones(step):
    state = step(new_state(), make_batch(0))[0]
    first = state.params
    # What Python calls in a thread that did not find the field before the other one made it.
    assert state.__getattr__("params") is first


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[field.name for field in dataclasses.fields(TrainState) if field.name != "graphdef"],
    meta_fields=["graphdef", "tag"],
)
@dataclass(frozen=True, kw_only=True)
class WithMetaField(TrainState):
    tag: Any


@flax.struct.dataclass(frozen=True)
class WithFlaxField(TrainState):
    tag: Any = flax.struct.field(pytree_node=False, kw_only=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WithOwnAttribute(TrainState):
    def __post_init__(self):
        object.__setattr__(self, "tag", "run")


def of_class(kind, state, **others):
    return kind(**{field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}, **others)


@pytest.mark.parametrize("tag", ["run", 3])
@pytest.mark.parametrize("kind", [WithMetaField, WithFlaxField])
def test_static_fields_that_a_subclass_declares_in_other_ways_stay_static(step, kind, tag):
    # By a step of its own: JAX may take the two kinds for one, see `register_dataclass`.
    state = make_train_step(loss_fn, TX)(of_class(kind, new_state(), tag=tag), make_batch(0))[0]
    assert type(state) is kind
    assert state.tag == tag
    assert type(state.tag) is type(tag)
    assert_same(jax.tree.leaves(state), jax.tree.leaves(step(new_state(), make_batch(0))[0]))


def test_the_structure_of_a_state_is_not_that_of_a_subclass():
    state = new_state()
    assert jax.tree.structure(of_class(WithOwnAttribute, state)) != jax.tree.structure(state)


def test_a_subclass_of_a_state_keeps_what_it_sets_when_it_is_made(step):
    assert step(of_class(WithOwnAttribute, new_state()), make_batch(0))[0].tag == "run"


DUPLICATES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda state: pickle.loads(pickle.dumps(state))}
all_duplicates = pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)


@all_duplicates
@pytest.mark.parametrize("steps", [0, 1])
def test_a_copy_is_a_state_that_steps_alike(step, steps, duplicate):
    def stepped():
        state = new_state()
        for _ in range(steps):
            state = step(state, make_batch(0))[0]
        return state

    state = stepped()
    other = duplicate(state)
    assert set(vars(other)) == {field.name for field in dataclasses.fields(state)}
    assert jax.tree.structure(other) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(other), jax.tree.leaves(state))
    assert_same(step(other, make_batch(1)), step(stepped(), make_batch(1)))


@all_duplicates
def test_copies_keep_attributes_that_are_no_fields(duplicate):
    state = of_class(WithOwnAttribute, new_state())
    object.__setattr__(state, "tag", "mine")
    assert duplicate(state).tag == "mine"


def test_a_deep_copy_has_arrays_of_its_own(step):
    state = new_state()
    other = copy.deepcopy(state)
    step(state, make_batch(0))
    assert int(step(other, make_batch(0))[0].step) == 1


def test_a_shallow_copy_shares_variables_read_or_not(step):
    state = step(new_state(), make_batch(0))[0]
    assert copy.copy(state).params is state.params
    assert copy.copy(state).params is state.params


@pytest.mark.parametrize("steps", [0, 1])
def test_a_name_that_a_state_does_not_have_raises(step, steps):
    state = new_state()
    for _ in range(steps):
        state = step(state, make_batch(0))[0]
    name = "parameters"
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'parameters'"):
        getattr(state, name)
