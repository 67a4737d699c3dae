"""Megatron's tracker and the process's one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_te.megatron import (
    InferenceCudaRNGStatesTracker,
    TECudaRNGStatesTracker,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from jax_te.random import model_parallel_seed


def test_the_contract():
    """What the reference documents name, under its names; the rest is in test_random.py."""
    tracker = TECudaRNGStatesTracker()
    assert not tracker.is_initialized()
    tracker.add(name="model-parallel-rng", seed=1)
    assert tracker.is_initialized()
    states = tracker.get_states()
    with tracker.fork() as first:
        pass
    with tracker.fork() as second:
        pass
    assert first != second
    tracker.set_states(states=states)
    with tracker.fork("model-parallel-rng") as again:
        pass
    assert again == first
    for name, seed in (("model-parallel-rng", 2), ("other", 1)):
        with pytest.raises(RuntimeError, match=r"is there already|is taken"):
            tracker.add(name, seed)
    with pytest.raises(KeyError, match="'other'"), tracker.fork("other"):
        pass
    tracker.reset()
    assert not tracker.is_initialized()
    assert not tracker.get_states()


def test_it_is_a_pytree():
    tracker = TECudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    leaves, treedef = jax.tree.flatten(tracker)
    assert len(leaves) == 2
    again = jax.tree.unflatten(treedef, leaves)
    assert type(again) is TECudaRNGStatesTracker
    assert again.is_initialized()


def test_a_tracker_with_the_inference_mark_tracks():
    tracker = TECudaRNGStatesTracker(is_inference_rng_tracker=True)
    assert tracker.is_inference_rng_tracker
    tracker.add("model-parallel-rng", 1)
    assert tracker.is_initialized()
    with pytest.raises(RuntimeError, match="is taken"):
        tracker.add("other", 1)
    with tracker.fork() as key:
        assert key is not None


def test_the_inference_tracker_draws_nothing():
    tracker = InferenceCudaRNGStatesTracker()
    assert isinstance(tracker, TECudaRNGStatesTracker)
    assert tracker.is_inference_rng_tracker
    assert type(jax.tree.map(lambda leaf: leaf, tracker)) is InferenceCudaRNGStatesTracker
    tracker.add("model-parallel-rng", 1)
    tracker.add("model-parallel-rng", 1)
    tracker.set_states(model_parallel_seed(1).get_states())
    assert not tracker.get_states()
    assert not tracker.is_initialized()
    with tracker.fork("any") as key:
        assert key is None


def test_the_process_has_one():
    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    with pytest.raises(AssertionError, match="model_parallel_cuda_manual_seed"):
        get_all_rng_states()
    initialize_rng_tracker(inference_rng_tracker=True)  # there is one: later arguments say nothing
    assert get_cuda_rng_tracker(inference_rng_tracker=True) is tracker
    assert not tracker.is_inference_rng_tracker
    model_parallel_cuda_manual_seed(1234)
    assert get_cuda_rng_tracker() is tracker
    model_parallel_cuda_manual_seed(1234)  # resets it, so that its seeds are free
    expected = model_parallel_seed(1234).get_states()
    assert get_all_rng_states().keys() == expected.keys()
    for name, state in get_all_rng_states().items():
        np.testing.assert_array_equal(*(jax.random.key_data(s.key) for s in (state, expected[name])))
    assert {get_data_parallel_rng_tracker_name(), get_expert_parallel_rng_tracker_name()} < expected.keys()
    model_parallel_cuda_manual_seed(1234, inference_rng_tracker=True, force_reset_rng=True)
    assert isinstance(get_cuda_rng_tracker(), InferenceCudaRNGStatesTracker)
    initialize_rng_tracker(force_reset=True)


def test_ranks_are_not_given():
    with pytest.raises(ValueError, match="tp_rank=1"):
        model_parallel_cuda_manual_seed(1, tp_rank=1)
    # The streams are those of rank 0.
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
