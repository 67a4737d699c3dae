"""Folders of Hugging Face in a job of several processes: each reads its devices' parts, the first one writes."""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_te._processes import Meetings, meeting
from jax_te.config import ParallelConfig
from jax_te.interop.huggingface import load_huggingface, peft_save, save, save_huggingface, save_peft
from jax_te.interop.huggingface.folder import ADAPTER_CONFIG, ADAPTER_TENSORS
from jax_te.interop.tables import host_arrays, on_host
from jax_te.layers import LoRA
from jax_te.sharding import make_mesh
from tests.interop.huggingface.test_folder import llama, params_of
from tests.support.numerics import assert_bitwise
from tests.support.processes import run_processes


def load_and_save(folder, copy, unwritable):
    """Return which share of the parameters this process holds, and what it is told of calls that fail."""
    whole = jax.tree.leaves(params_of(llama()))
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=2), axis_type="explicit")):
        model = load_huggingface(folder)
        held, size = 0, 0
        for leaf, expected in zip(jax.tree.leaves(params_of(model)), whole, strict=True):
            for shard in leaf.addressable_shards:
                assert_bitwise(shard.data, np.asarray(expected)[shard.index])
            # Of a part that several devices hold, one has replica 0.
            held += sum(shard.data.size for shard in leaf.addressable_shards if shard.replica_id == 0)
            size += leaf.size
        save_huggingface(model, copy, max_shard_size=20_000)
        assert (copy / "config.json").is_file()  # none returns before it is written
        told = told_of_failures(model, folder, copy, unwritable)
        save_huggingface(model, copy, max_shard_size=20_000)
    with jax.set_mesh(make_mesh(ParallelConfig(data=4), axis_type="explicit")):
        save_slowly(load_huggingface(folder), copy, copy / "adapter")
    return held / size, told


def told_of_failures(model, folder, copy, unwritable):
    """Return what this process is told of calls that fail in one process, before, at and after the first write."""
    write, told = save.write_folder, []
    with pytest.raises((ValueError, OSError), match="is not there") as error:
        save_huggingface(model, copy, like=folder if jax.process_index() == 0 else folder / "elsewhere")
    told.append(str(error.value))
    with pytest.raises(OSError, match="File exists") as error:
        save_huggingface(model, unwritable)
    told.append(str(error.value))
    # The first is a TimeoutError of Python, which is no missed meeting: that of a file system.
    for number in (errno.ETIMEDOUT, errno.ENOSPC):
        if jax.process_index() == 0:
            save.write_folder = functools.partial(fail_at_the_fifth, OSError(number, os.strerror(number)))
        with pytest.raises(OSError, match=os.strerror(number)) as error:
            save_huggingface(model, copy)
        told.append(str(error.value))
    save.write_folder = write
    return told


def fail_at_the_fifth(error, folder, config, plan, tensors, limit):
    for _ in range(5):
        next(tensors)
    raise error


def save_slowly(model, copy, adapter):
    """Save parameters that every process holds, in more time than one process waits for a parameter."""
    write, write_adapter, bound = save.write_folder, peft_save.write_file, meeting._BOUND
    meeting._BOUND = 3.0
    if jax.process_index() == 0:
        save.write_folder = lambda *args: write(*args[:3], slow(args[3], 0.25), args[4])
        peft_save.write_file = lambda path, plan, tensors: write_adapter(path, plan, slow(tensors, 2.0))
    begin = time.monotonic()
    save_huggingface(model, copy, max_shard_size=20_000)
    model.layers[0].self_attention.proj = LoRA(model.layers[0].self_attention.proj, 2, rngs=nnx.Rngs(0))
    between = time.monotonic()
    save_peft(model, adapter)
    assert begin + meeting._BOUND < between < time.monotonic() - meeting._BOUND
    save.write_folder, peft_save.write_file, meeting._BOUND = write, write_adapter, bound


def slow(tensors, seconds):
    for tensor in tensors:
        time.sleep(seconds)
        yield tensor


def gather_shard_by_shard():
    """Return the largest array on a device meanwhile, for shards of several dtypes; all bits arrive as they are."""
    mesh = make_mesh(ParallelConfig(fsdp=2, tensor=2), axis_type="explicit")
    # Also zeros with a sign, and values that are no numbers, which a sum would change.
    patterns = np.arange(256, dtype=np.uint8).repeat(32).reshape(64, 128)
    largest = []
    meetings = Meetings("gather").__enter__()
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32):
        expected = patterns.view(dtype)
        place = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
        array = jax.make_array_from_callback(expected.shape, place, lambda index, whole=expected: whole[index])
        first = on_host(array, meetings, everywhere=False)
        assert (first is None) == (jax.process_index() == 1)
        assert first is None or first.tobytes() == expected.tobytes()
        assert on_host(array, meetings).tobytes() == expected.tobytes()
        program = host_arrays._shard.lower(array, np.int32(0), mesh=mesh, spec=place.spec).compile().as_text()
        sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in re.findall(r"u8\[([\d,]+)\]", program)]
        largest.append(max(sizes) / expected.nbytes)
    return largest


class SlowEnd:
    """Object that makes the end of the interpreter take two seconds."""

    def __del__(self, sleep=time.sleep):
        sleep(2.0)


def wait_in_vain(folder, copy):
    """Return what a process is told that waits for another one, which does not go on writing.

    Process 1 ends while the interpreter of process 0 does: a thread that waited for it in C++ would abort process 0.
    """
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=2), axis_type="explicit")):
        model = load_huggingface(folder)
        meeting._BOUND = 2.0
        if jax.process_index() == 0:
            save.write_folder = stop_at_the_third
        with pytest.raises(TimeoutError) as told:
            save_huggingface(model, copy)
    if jax.process_index() == 0:
        sys.kept_until_the_end = SlowEnd()
    return str(told.value)


def stop_at_the_third(folder, config, plan, tensors, limit):
    for _ in range(3):
        next(tensors)
    time.sleep(4.0)
    next(tensors)


@pytest.mark.slow
def test_two_processes_load_their_parts_and_the_first_writes(tmp_path):
    folder, copy, unwritable = (tmp_path / name for name in ("folder", "copy", "file"))
    save_huggingface(llama(), folder, max_shard_size=20_000)
    unwritable.write_text("no folder")
    first, second = (each.result for each in run_processes(2, load_and_save, (folder, copy, unwritable), devices=2))
    assert 0.3 < second[0] < 0.5 < first[0] < 0.7  # norms are whole everywhere, and counted for the first
    assert sorted(path.name for path in (copy / "adapter").iterdir()) == [ADAPTER_CONFIG, ADAPTER_TENSORS]
    for path in folder.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes(), path.name
    elsewhere, *writing = zip(first[1], second[1], strict=True)
    assert elsewhere[0] == f"[Errno 5] save_huggingface failed in process 1: ValueError: {elsewhere[1]}"
    for (own, told), kind in zip(writing, ("FileExistsError", "TimeoutError", "OSError"), strict=True):
        assert told == f"[Errno 5] save_huggingface failed in process 0: {kind}: {own}"


@pytest.mark.slow
def test_sharded_arrays_are_gathered_shard_by_shard():
    first, second = (each.result for each in run_processes(2, gather_shard_by_shard, devices=2))
    assert first == second == [0.25] * 3  # of the bytes of the array, on four devices


@pytest.mark.costly
def test_no_process_waits_forever_for_another(tmp_path):
    save_huggingface(llama(), tmp_path / "folder", max_shard_size=20_000)
    told = [each.result for each in run_processes(2, wait_in_vain, (tmp_path / "folder", tmp_path / "copy"), devices=2)]
    assert told[0] == told[1]
    assert "process 1 waited 2 s for process 0 in save_huggingface" in told[0]
    assert not (tmp_path / "copy" / "config.json").exists()
