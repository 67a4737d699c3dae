"""Folders of torch.distributed.checkpoint that are written without torch; test_parity.py lets torch read them."""

import os

import ml_dtypes
import numpy as np
import pytest

from jax_te.interop.torch import read_torch_distributed, write_torch_distributed

ENTRIES = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6).T,
    "b.c": np.arange(3),
    "d": np.full((), 2.5, ml_dtypes.bfloat16),
    "common_state/shard_0_1": [{"iteration": 5, "name": "é"}],
}


def same(found, entries):
    assert (list(found.tensors), list(found.others)) == (["a", "b.c", "d"], ["common_state/shard_0_1"])
    for name, tensor in found.tensors.items():
        assert (tensor.shape, tensor.dtype) == (entries[name].shape, entries[name].dtype)
        np.testing.assert_array_equal(np.asarray(tensor), entries[name])
    return found.others["common_state/shard_0_1"]() == entries["common_state/shard_0_1"]


def test_what_is_written_is_read(tmp_path):
    write_torch_distributed(tmp_path / "new", ENTRIES)
    assert same(read_torch_distributed(tmp_path / "new"), ENTRIES)


def test_a_second_takes_the_place_of_the_first_when_it_is_whole(tmp_path):
    write_torch_distributed(tmp_path, ENTRIES)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(TypeError, match="float8_e3m4"):
        write_torch_distributed(tmp_path, {"a": np.zeros(2), "b": np.zeros(2, ml_dtypes.float8_e3m4)})
    assert same(read_torch_distributed(tmp_path), ENTRIES)
    # Also while its tensors are those of the folder itself.
    again = {**read_torch_distributed(tmp_path).tensors, "common_state/shard_0_1": []}
    write_torch_distributed(tmp_path, again)
    assert not same(read_torch_distributed(tmp_path), ENTRIES)
    assert len(os.listdir(tmp_path)) == len(before)
