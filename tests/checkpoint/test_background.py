"""What a save does while the training loop goes on: the state may change, and errors wait for the next call."""

from __future__ import annotations

import contextlib
import errno
import operator
import subprocess
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint import TrainCheckpointer, host
from jax_te.checkpoint import checkpointer as checkpointer_module
from jax_te.training import create_train_state
from tests.checkpoint.test_failures import start
from tests.support.meshes import MODES, use_mesh
from tests.support.toy import Toy, values


@contextlib.contextmanager
def slow_disk(monkeypatch, error: Exception | None = None):
    """Yield an event before which nothing is written, and with ``error`` nothing after it."""
    save, go_on = ocp.training.Checkpointer.save_checkpointables_async, threading.Event()

    def save_later(*args, **options):
        assert go_on.wait(60.0)
        if error is not None:
            raise error
        return save(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ocp.training.Checkpointer, "save_checkpointables_async", save_later)
        try:
            yield go_on
        finally:
            go_on.set()


def described(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def delete(state):
    """As a step does that the state is donated to; without waiting for what reads it."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def bytes_pinned():
    """Return the bytes of all arrays in the memory that saves copy to."""
    found = [leaf for leaf in jax.live_arrays() if leaf.sharding.memory_kind == host.PINNED and not leaf.is_deleted()]
    # An array of several devices and those of its parts are the same memory.
    parts = [shard.data for leaf in found for shard in leaf.addressable_shards]
    return sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values())


@pytest.mark.costly("explicit", "auto")
@pytest.mark.parametrize("mode", MODES)
def test_a_save_returns_before_anything_is_written_and_keeps_the_old_values(tmp_path, monkeypatch, mode):
    """Sharded, replicated and typed keys, on every kind of mesh; in host memory there is one copy of each, and then
    none."""
    before = bytes_pinned()
    with use_mesh(mode), TrainCheckpointer(tmp_path) as checkpointer:
        state = create_train_state(Toy, optax.adam(0.1), key=jax.random.key(1))
        size = sum(value.nbytes for value in values(state))
        wanted, saved = described(state), [value.tobytes() for value in values(state)]
        with slow_disk(monkeypatch) as go_on:
            checkpointer.save(state, {"at": 1}, 1)
            delete(state)
            checkpointer.check()
            assert not list(tmp_path.glob("[!.]*"))  # only the lock of the folder
            assert bytes_pinned() == before + size
            go_on.set()
            assert checkpointer.latest_step() == 1
        assert bytes_pinned() == before
        restored, _, _ = checkpointer.restore(wanted)
    assert [value.tobytes() for value in values(restored)] == saved


@pytest.mark.costly
def test_a_donating_step_right_after_a_save(tmp_path, monkeypatch):
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1.0, state), donate_argnums=0)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    state = {
        spec: jax.device_put(jnp.zeros((1024, 2048)), jax.NamedSharding(mesh, jax.P(*spec))) for spec in ("", "y", "xy")
    }
    wanted = described(state)
    with TrainCheckpointer(tmp_path) as checkpointer, slow_disk(monkeypatch) as go_on:
        checkpointer.save(state, None, 1)
        for _ in range(3):
            state = advance(state)
        go_on.set()
        restored, _, _ = checkpointer.restore(wanted)
    for spec, leaf in restored.items():
        assert np.all(np.asarray(leaf) == 0.0)
        assert np.all(np.asarray(state[spec]) == 3.0)


def test_a_save_under_way_holds_nothing_on_the_devices(tmp_path, monkeypatch):
    """A step that donates nothing has freed the old state when it needs the memory."""
    state = {"a": jnp.ones(1024), "key": jax.random.key(0)}
    held = [weakref.ref(leaf) for leaf in state.values()]
    with TrainCheckpointer(tmp_path) as checkpointer, slow_disk(monkeypatch):
        checkpointer.save(state, None, 1)
        del state
        assert [leaf() for leaf in held] == [None, None]


def test_arrays_of_numpy_and_the_state_of_the_data_may_change(tmp_path, monkeypatch):
    state, data = {"a": np.arange(4.0, dtype=np.float32), "b": jnp.ones(2)}, {"at": [1]}
    with TrainCheckpointer(tmp_path) as checkpointer, slow_disk(monkeypatch) as go_on:
        checkpointer.save(state, data, 1)
        state["a"][:] = 7.0
        data["at"].append(2)
        go_on.set()
        restored, data_state, _ = checkpointer.restore(
            {"a": jax.ShapeDtypeStruct((4,), jnp.float32), "b": jnp.zeros(2)}
        )
    assert restored["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert data_state == {"at": [1]}


def test_a_state_that_is_in_pinned_memory_already_is_copied(tmp_path, monkeypatch):
    before = bytes_pinned()
    kept = jax.device_put(jnp.arange(8.0), jnp.zeros(1).sharding.with_memory_kind(host.PINNED))
    with TrainCheckpointer(tmp_path) as checkpointer, slow_disk(monkeypatch) as go_on:
        checkpointer.save({"a": kept}, None, 1)
        assert bytes_pinned() == before + 2 * kept.nbytes
        go_on.set()
        checkpointer.wait()
        assert kept.tolist() == list(range(8))
        kept.delete()
        restored, _, _ = checkpointer.restore({"a": jnp.zeros(8)})
    assert restored["a"].tolist() == list(range(8))


@pytest.mark.parametrize("why", ["no such memory", "too little of it", "two elements in a byte"])
def test_what_cannot_be_copied_so_is_copied_by_orbax_before_save_returns(tmp_path, monkeypatch, caplog, why):
    def refuse(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of pinned memory")

    # Arrays of this test alone have its mesh, so that no answer of another test, where there is the memory, is theirs.
    place = NamedSharding(jax.make_mesh((1,), (why.replace(" ", "_"),), devices=jax.devices()[:1]), PartitionSpec())
    if why == "no such memory":
        monkeypatch.setattr(host, "PINNED", "another")
    elif why == "too little of it":
        monkeypatch.setattr(checkpointer_module, "host_copies", refuse)
    dtype = jnp.int4 if why == "two elements in a byte" else jnp.int8
    with TrainCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            arrays = {"a": jnp.arange(-4, 4).astype(dtype), "key": jax.random.key(step)}
            state = {**jax.device_put(arrays, place), "b": np.ones(2, np.float32)}
            checkpointer.save(state, None, step)
            delete({"a": state["a"]})
            state["b"][:] = 0.0
        wanted = {"a": jax.ShapeDtypeStruct((8,), dtype), "key": jax.random.key(0), "b": jnp.zeros(2)}
        restored, _, step = checkpointer.restore(wanted)
    assert (step, restored["a"].tolist(), restored["b"].tolist()) == (2, list(range(-4, 4)), [1.0, 1.0])
    assert jnp.array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(jax.random.key(2)))
    told = [record for record in caplog.records if "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in record.getMessage()]
    assert len(told) == (why == "too little of it")


def check_again_and_again(checkpointer):
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        checkpointer.check()


def save_another(checkpointer):
    checkpointer.save({"a": jnp.ones(1024)}, None, 3)


CALLS = [check_again_and_again, save_another, *map(operator.methodcaller, ("wait", "latest_step", "close"))]


@pytest.mark.parametrize("next_call", CALLS, ids=["check", "save", "wait", "latest_step", "close"])
def test_an_error_in_the_background_is_that_of_the_next_call(tmp_path, monkeypatch, next_call):
    state, before = {"a": jnp.ones(1024)}, bytes_pinned()
    checkpointer = TrainCheckpointer(tmp_path)
    checkpointer.save(state, None, 1)
    checkpointer.wait()
    with slow_disk(monkeypatch, OSError(errno.EIO, "the disk is gone")) as go_on:
        checkpointer.save(state, None, 2)
        go_on.set()
        message = r"step 2 could not be saved: .*the disk is gone; checkpoint step 1 is still good"
        with pytest.raises(OSError, match=message):
            next_call(checkpointer)
    assert bytes_pinned() == before
    checkpointer.save(state, None, 4)
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


def test_a_save_waits_for_the_one_before_it(tmp_path, monkeypatch):
    with TrainCheckpointer(tmp_path) as checkpointer, slow_disk(monkeypatch) as go_on:
        checkpointer.save({"a": jnp.ones(8)}, None, 1)
        timer = threading.Timer(0.2, go_on.set)
        timer.start()
        checkpointer.save({"a": jnp.ones(8)}, None, 2)
        assert go_on.is_set()
        assert (tmp_path / "1").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


TWO_RUNS = """
import sys, jax.numpy as jnp
from jax_te.checkpoint import TrainCheckpointer
state = {str(i): jnp.ones((64, 64)) * i for i in range(200)}
with TrainCheckpointer(sys.argv[1] + "/a") as one, TrainCheckpointer(sys.argv[1] + "/b") as two:
    for step in range(8):
        one.save(state, None, step)
        two.save(state, None, step)
    for checkpointer in (one, two):
        restored, _, step = checkpointer.restore(state)
        print(step, all(jnp.array_equal(restored[name], leaf) for name, leaf in state.items()))
"""


@pytest.mark.slow
def test_two_runs_of_a_process_save_at_once(tmp_path):
    """Orbax numbers its operations for the whole process. With folders made by these numbers, three of four such
    processes failed or waited for ever."""
    with start(TWO_RUNS, tmp_path) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == "7 True\n" * 2


@pytest.mark.parametrize(
    ("change", "error"),
    [({"step": -1}, ValueError), ({"step": 1}, ValueError), ({"data_state": object()}, TypeError)],
)
def test_what_is_refused_is_refused_by_save_itself(tmp_path, monkeypatch, change, error):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": jnp.ones(8)}, None, 1)
        checkpointer.wait()
        with slow_disk(monkeypatch), pytest.raises(error):
            checkpointer.save({"a": jnp.ones(8)}, **{"data_state": None, "step": 2, **change})


@pytest.mark.parametrize("leaf", [3, 2.0, "a", jax.ShapeDtypeStruct((2,), jnp.float32)], ids=str)
def test_what_is_no_array_is_refused_by_name(tmp_path, leaf):
    with TrainCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="layers/1 is not an array"):
            checkpointer.save({"layers": [jnp.ones(2), leaf]}, None, 1)
        checkpointer.save({"layers": [jnp.ones(2)]}, None, 1)
        assert checkpointer.latest_step() == 1


FORGETFUL = """
import sys, jax.numpy as jnp
from jax_te.checkpoint import TrainCheckpointer
state = {str(i): jnp.ones((512, 512)) for i in range(20)}
checkpointer = TrainCheckpointer(sys.argv[1])
checkpointer.save(state, None, 1)
checkpointer.wait()
checkpointer.save(state, None, 2)
"""


@pytest.mark.costly
def test_a_process_that_ends_without_closing_leaves_whole_checkpoints(tmp_path):
    with start(FORGETFUL, tmp_path, stderr=subprocess.DEVNULL) as process:
        assert process.wait(timeout=60) == 0
    with TrainCheckpointer(tmp_path) as checkpointer:
        restored, _, step = checkpointer.restore({str(i): jnp.zeros((512, 512)) for i in range(20)})
        assert step in (1, 2)
        assert all(np.all(np.asarray(leaf) == 1.0) for leaf in restored.values())
        checkpointer.save(restored, None, 3)
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize("spec", [jax.P(), jax.P("x"), jax.P("x", "y")])
def test_a_state_that_is_in_pinned_memory_already(tmp_path, spec):
    """Such as an optimizer's that is held on the host, with replicas."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    place = jax.NamedSharding(mesh, spec, memory_kind=host.PINNED)
    state = {"moment": jax.device_put(jnp.arange(16.0).reshape(4, 4), place)}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        restored, _, _ = checkpointer.restore(state)
    np.testing.assert_array_equal(restored["moment"], state["moment"])
