"""Streams of random keys: the reference's contract, and the tracker as a pytree under every transformation."""

from __future__ import annotations

import copy
import pickle
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_te.checkpoint import TrainCheckpointer
from jax_te.layers.dropout import dropout
from jax_te.random import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    MODEL_PARALLEL_RNG,
    RNGStatesTracker,
    model_parallel_seed,
    model_parallel_seeds,
)
from tests.support.meshes import use_mesh
from tests.support.numerics import quick_jit, without_type_checker


def tracker_of(**seeds: int) -> RNGStatesTracker:
    tracker = RNGStatesTracker()
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def next_key(tracker: RNGStatesTracker, name: str = "a") -> jax.Array:
    with tracker.fork(name) as key:
        return jax.random.key_data(key)


def expected_key(name: str, seed: int, count: int) -> jax.Array:
    stream = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    return jax.random.key_data(jax.random.fold_in(stream, count))


def test_each_fork_gives_the_next_key_of_its_stream_also_nested():
    tracker = tracker_of(a=1, b=2)
    with tracker.fork("a") as first, tracker.fork("b") as inner, tracker.fork("a") as second:
        found = [first, inner, second]
    for key, (name, seed, count) in zip(found, [("a", 1, 0), ("b", 2, 0), ("a", 1, 1)], strict=True):
        np.testing.assert_array_equal(jax.random.key_data(key), expected_key(name, seed, count))
    np.testing.assert_array_equal(next_key(tracker), expected_key("a", 1, 2))


def test_a_stream_of_one_seed_is_not_that_of_another_name():
    assert (next_key(tracker_of(a=5)) != next_key(tracker_of(b=5), "b")).any()


def test_initialized_after_add_or_set_states_until_reset():
    tracker = RNGStatesTracker()
    assert not tracker.is_initialized()
    tracker.set_states({})
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
    tracker.add("a", 0)
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.get_states()
    tracker.add("a", 0)  # the seed is free again


def test_a_name_or_seed_that_is_taken_is_refused():
    tracker = tracker_of(a=1)
    with pytest.raises(RuntimeError, match="seed 1 is taken"):
        tracker.add("b", 1)
    with pytest.raises(RuntimeError, match="stream 'a' is there already"):
        tracker.add("a", 2)
    tracker.set_states({})
    with pytest.raises(RuntimeError, match="seed 1 is taken"):  # set_states leaves seeds alone
        tracker.add("b", 1)
    with pytest.raises(KeyError, match="there is no stream 'c'"), tracker.fork("c"):
        pass


def test_bad_seeds_and_states_say_what_is_allowed():
    tracker = RNGStatesTracker()
    with without_type_checker():
        for seed in (1.0, True, jnp.ones((), jnp.int32)):
            with pytest.raises((TypeError, ValueError), match=r"seed must be an? "):
                tracker.add("a", seed)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="states must be a mapping"):
            tracker.set_states([])  # type: ignore[arg-type]
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"a seed must be in \[0, 2\^32\)"):
            tracker.add("a", seed)
    with pytest.raises(TypeError, match=r"must be typed, from jax\.random\.key"):
        tracker.set_states({"a": (jnp.zeros(2, jnp.uint32), 0)})
    with pytest.raises(TypeError, match=r"must be \(key, count\)"):
        tracker.set_states({"a": 3})


def test_states_are_a_copy_and_bring_a_stream_back():
    tracker = tracker_of(a=1)
    states = tracker.get_states()
    first = next_key(tracker)
    assert states["a"].count == 0
    tracker.set_states(states)
    states.clear()
    np.testing.assert_array_equal(next_key(tracker), first)


def test_through_jit_scan_and_checkpoint_streams_go_on():
    """As many keys as forks, each one used once, in the order of a loop without any of them."""

    def draw(tracker: Any, x: Any) -> Any:
        with tracker.fork("a") as key:
            return tracker, x + jax.random.uniform(key)

    @quick_jit
    def run(tracker: Any) -> Any:
        tracker, first = draw(tracker, 0.0)
        tracker, rest = jax.lax.scan(jax.checkpoint(draw), tracker, jnp.zeros(2))
        return tracker, jnp.append(rest, first)

    tracker, drawn = run(tracker_of(a=1))
    keys = [jax.random.wrap_key_data(expected_key("a", 1, count)) for count in (1, 2, 0)]
    np.testing.assert_array_equal(drawn, [jax.random.uniform(key) for key in keys])
    np.testing.assert_array_equal(next_key(tracker), expected_key("a", 1, 3))


def test_a_tracker_from_outside_of_the_traced_function_is_refused():
    """Its later calls would draw the same again."""
    tracker = tracker_of(a=1)
    for transform in (jax.jit, jax.grad, jax.checkpoint):
        with pytest.raises(RuntimeError, match="pass it as an argument and return it"):
            transform(lambda x: x * next_key(tracker)[0].astype(jnp.float32))(1.0)
    jax.jit(lambda states: tracker.set_states(states))(tracker.get_states())
    with pytest.raises(RuntimeError, match="left inside of one that has ended"):
        next_key(tracker)


def test_dropout_masks_are_those_of_every_mesh_outside_of_shard_map():
    def drop(tracker: Any) -> Any:
        with tracker.fork() as key:
            return dropout(jnp.ones((4, 8)), 0.5, key, axes=("batch", "heads"))

    expected = quick_jit(drop)(model_parallel_seed(3))
    assert 0 < np.count_nonzero(expected) < expected.size
    for mode in ("auto", "explicit"):
        with use_mesh(mode):
            np.testing.assert_array_equal(quick_jit(drop)(model_parallel_seed(3)), expected)


def test_inside_shard_map_tensor_ranks_draw_apart_where_megatrons_do():
    def drop(tracker: Any, name: str) -> Any:
        with tracker.fork(name) as key:
            return jax.random.uniform(key, (1, 1))

    def on_ranks(name: str) -> Any:
        spec = P(("data", "fsdp"), "tensor")
        run = jax.shard_map(lambda tracker: drop(tracker, name), in_specs=P(), out_specs=spec)
        return quick_jit(run)(model_parallel_seed(3))

    with use_mesh("auto"):
        by_name = {name: on_ranks(name) for name in (DATA_PARALLEL_RNG, MODEL_PARALLEL_RNG, EXPERT_PARALLEL_RNG)}
    assert len(np.unique(by_name[DATA_PARALLEL_RNG])) == 1
    for name in (MODEL_PARALLEL_RNG, EXPERT_PARALLEL_RNG):
        (row,) = np.unique(by_name[name], axis=0)  # the same on data-parallel ranks
        assert len(np.unique(row)) == 2
        with model_parallel_seed(3).fork(name) as key:
            for rank in range(2):
                assert row[rank] == jax.random.uniform(jax.random.fold_in(key, rank))


def test_saved_and_restored(tmp_path):
    tracker = model_parallel_seed(3)
    next_key(tracker, MODEL_PARALLEL_RNG)
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"rng": tracker}, None, step=1)
        restored, _, _ = checkpointer.restore({"rng": jax.eval_shape(lambda: model_parallel_seed(3))})
    copies = [restored["rng"], pickle.loads(pickle.dumps(tracker)), copy.deepcopy(tracker)]
    expected = next_key(tracker, MODEL_PARALLEL_RNG)
    for other in copies:
        np.testing.assert_array_equal(next_key(other, MODEL_PARALLEL_RNG), expected)
        with pytest.raises(RuntimeError, match="seed 3 is taken"):
            other.add("another", 3)


def test_megatrons_integers():
    """``tp_rank``, ``ep_rank``, ``etp_rank``, ``pp_rank``, ``dp_rank`` -> the seeds of its three streams."""
    table = {
        (0, 0, 0, 0, 0): (1234, 3952, 2258),
        (3, 0, 0, 0, 0): (1234, 3955, 2258),
        (0, 2, 1, 0, 0): (1234, 3952, 2459),
        (1, 0, 0, 2, 3): (1464, 4183, 2488),
    }
    names = ("tp_rank", "ep_rank", "etp_rank", "pp_rank", "dp_rank")
    for ranks, seeds in table.items():
        found = model_parallel_seeds(1234, **dict(zip(names, ranks, strict=True)))
        assert found == dict(zip((DATA_PARALLEL_RNG, MODEL_PARALLEL_RNG, EXPERT_PARALLEL_RNG), seeds, strict=True))
    states = model_parallel_seed(1234).get_states()
    for name, seed in model_parallel_seeds(1234).items():
        stream = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        assert states[name].key == stream
    with pytest.raises(ValueError, match=r"a seed must be in \[0, 2\^32\), got -1"):
        model_parallel_seeds(-1)
    assert model_parallel_seeds(0)[DATA_PARALLEL_RNG] == 0  # which Megatron takes, too


def test_under_grad_a_copy_of_the_argument_draws_and_is_returned():
    def loss(x: Any, tracker: Any) -> Any:
        tracker = tracker.copy()
        with tracker.fork("a") as key:
            return x * jax.random.uniform(key), tracker

    grad = jax.grad(loss, has_aux=True)
    for transform in (grad, quick_jit(grad)):
        tracker = tracker_of(a=1)
        for count in range(2):
            gradient, tracker = transform(1.0, tracker)
            key = jax.random.wrap_key_data(expected_key("a", 1, count))
            np.testing.assert_array_equal(gradient, jax.random.uniform(key))
    drawn, _ = jax.vmap(loss, in_axes=(0, None), out_axes=(0, None))(jnp.ones(2), tracker_of(a=1))
    assert drawn.shape == (2,)


def test_a_copy_of_a_tracker_that_a_jitted_function_closed_over_is_refused():
    tracker = tracker_of(a=1)
    with pytest.raises(RuntimeError, match="was not passed to the jitted function"):
        jax.jit(lambda x: x * next_key(tracker.copy())[0].astype(jnp.float32))(1.0)
    assert tracker.get_states()["a"].count == 0


def test_a_refused_seed_leaves_the_streams():
    tracker = RNGStatesTracker()
    tracker.add("mine", 7)
    with pytest.raises(ValueError, match="seed"):
        model_parallel_seed(2**32 - 1, tracker)
    assert list(tracker.get_states()) == ["mine"]
