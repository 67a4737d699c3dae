"""A trace changes how often Python collects garbage while it runs, and at no other time."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.training import create_train_state, make_train_step
from jax_te.training.collector import collect_rarely


@pytest.fixture
def usual():
    before = gc.get_threshold()
    gc.set_threshold(600, 9, 8)
    yield gc.get_threshold()  # without what this Python does not keep
    gc.set_threshold(*before)


def test_a_step_collects_rarely_while_it_is_traced_alone(usual):
    seen = []

    def loss(model, batch, key):
        seen.append(gc.get_threshold())
        if batch.shape[-1] != 2:
            raise RuntimeError("in the middle")
        return jnp.mean(model(batch))

    state = create_train_state(lambda rngs: nnx.Linear(2, 1, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
    step = make_train_step(loss, optax.sgd(0.1))
    state, _ = step(state, jnp.ones((4, 2)))
    assert seen
    assert all(first > 600 and others == list(usual[1:]) for first, *others in seen)
    assert gc.get_threshold() == usual
    with pytest.raises(RuntimeError, match="in the middle"):
        step(state, jnp.ones((4, 3)))
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_contexts_that_overlap_leave_what_was_there(usual, first_out):
    first, second = collect_rarely(), collect_rarely()
    first.__enter__()
    second.__enter__()
    for context in (first, second) if first_out == "first" else (second, first):
        context.__exit__(None, None, None)
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("own", [0, 800, 100_000])
def test_a_number_that_is_set_meanwhile_stays(usual, own):
    with collect_rarely():
        gc.set_threshold(own, 9, 8)
    assert gc.get_threshold() == (own, *usual[1:])


@pytest.mark.parametrize("own", [0, 100_000], ids=["off", "rarer"])
def test_a_user_who_collects_less_often_is_left_alone(usual, own):
    gc.set_threshold(own, 9, 8)
    with collect_rarely():
        assert gc.get_threshold() == (own, *usual[1:])
    assert gc.get_threshold() == (own, *usual[1:])
