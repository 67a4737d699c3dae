"""Folders of Hugging Face in a job of several processes: each reads its devices' parts, the first one writes."""

from __future__ import annotations

import re
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_te.config import ParallelConfig
from jax_te.interop.huggingface import load_huggingface, save, save_huggingface
from jax_te.interop.tables import host_arrays, on_host
from jax_te.sharding import make_mesh
from tests.interop.huggingface.test_folder import llama, params_of
from tests.support.numerics import assert_bitwise
from tests.support.processes import run_processes


def load_and_save(folder, copy, unwritable):
    """Return which share of the parameters this process holds, and what it is told of a folder that is none."""
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
        with pytest.raises(OSError, match="File exists") as told:
            save_huggingface(model, unwritable)
        # Half of the tensors are written when the disk is full.
        if jax.process_index() == 0:
            save.write_folder = fail_at_the_fifth
        with pytest.raises(OSError, match="no space left") as full:
            save_huggingface(model, copy)
    return held / size, str(told.value), str(full.value)


def fail_at_the_fifth(folder, config, plan, tensors, limit):
    for _ in range(5):
        next(tensors)
    raise OSError(28, "no space left on device")


def gather_shard_by_shard():
    """Return the largest array on a device meanwhile, for shards of several dtypes; all bits arrive as they are."""
    mesh = make_mesh(ParallelConfig(fsdp=2, tensor=2), axis_type="explicit")
    # Also zeros with a sign, and values that are no numbers, which a sum would change.
    patterns = np.arange(256, dtype=np.uint8).repeat(32).reshape(64, 128)
    largest = []
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32):
        expected = patterns.view(dtype)
        place = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
        array = jax.make_array_from_callback(expected.shape, place, lambda index, whole=expected: whole[index])
        first = on_host(array, everywhere=False)
        assert (first is None) == (jax.process_index() == 1)
        assert first is None or first.tobytes() == expected.tobytes()
        assert on_host(array).tobytes() == expected.tobytes()
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
        host_arrays._BOUND = 2.0
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


@pytest.mark.costly
def test_two_processes_load_their_parts_and_the_first_writes(tmp_path):
    folder, copy, unwritable = (tmp_path / name for name in ("folder", "copy", "file"))
    save_huggingface(llama(), folder, max_shard_size=20_000)
    unwritable.write_text("no folder")
    first, second = (each.result for each in run_processes(2, load_and_save, (folder, copy, unwritable), devices=2))
    assert 0.3 < second[0] < 0.5 < first[0] < 0.7  # norms are whole everywhere, and counted for the first
    for path in folder.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes(), path.name
    assert "file" in first[1]
    assert second[1] == f"[Errno 5] the first process could not write: FileExistsError: {first[1]}: '{unwritable}'"
    assert first[2] == "[Errno 28] no space left on device"
    assert f"the first process could not write: OSError: {first[2]}" in second[2]


def test_sharded_arrays_are_gathered_shard_by_shard():
    first, second = (each.result for each in run_processes(2, gather_shard_by_shard, devices=2))
    assert first == second == [0.25] * 3  # of the bytes of the array, on four devices


@pytest.mark.costly
def test_no_process_waits_forever_for_another(tmp_path):
    save_huggingface(llama(), tmp_path / "folder", max_shard_size=20_000)
    told = [each.result for each in run_processes(2, wait_in_vain, (tmp_path / "folder", tmp_path / "copy"), devices=2)]
    for number, text in enumerate(told):
        assert f"process {number} waited 2 s for the others" in text
    assert not (tmp_path / "copy" / "config.json").exists()
