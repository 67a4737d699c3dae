"""Folders of Hugging Face in a job of several processes: each reads its devices' parts, the first one writes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_te.config import ParallelConfig
from jax_te.interop.huggingface import load_huggingface, save, save_huggingface
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
