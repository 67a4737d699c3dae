"""Folders of torch.distributed.checkpoint, made without torch: chunks are merged, faults named."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_te.interop.torch import read_torch_distributed
from tests.interop.torch.test_read_file import Runs, message_of
from tests.support.distributed_folder import write_distributed

ARRAYS = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b.c": np.arange(3), "d": np.ones((), np.float16)}


def test_chunks_are_merged(tmp_path):
    write_distributed(tmp_path, ARRAYS, {"step": [5]})
    found = read_torch_distributed(tmp_path)
    assert (list(found.others), list(found.tensors), len(found.files)) == (["step"], list(ARRAYS), 2)
    assert found.others["step"]() == [5]
    for name, array in ARRAYS.items():
        tensor = found.tensors[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(tensor), array)
    for file in found.files:
        file.release()
    np.testing.assert_array_equal(np.asarray(found.tensors["a"]), ARRAYS["a"])


def test_a_chunk_with_another_checksum_is_refused_when_it_is_read(tmp_path):
    write_distributed(tmp_path, ARRAYS)
    last = ARRAYS["a"][-1, -2:].tobytes()  # in one of its chunks
    for path in tmp_path.glob("*.distcp"):
        path.write_bytes(path.read_bytes().replace(last, bytes(len(last))))
    found = read_torch_distributed(tmp_path)
    np.testing.assert_array_equal(np.asarray(found.tensors["b.c"]), ARRAYS["b.c"])
    with pytest.raises(ValueError, match=r": a, entry .*, is damaged: its bytes have another checksum"):
        np.asarray(found.tensors["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../__0_0.distcp"}, "not a name of a .distcp file"),
        ({"relative_path": "/etc/passwd"}, "not a name of a .distcp file"),
        ({"relative_path": "__9_0.distcp"}, "is not a file"),
        ({"offset": -1}, "damaged"),
        ({"length": 2**40}, "damaged"),
        ({"transform_descriptors": ["zstd"]}, "is packed"),
    ],
)
def test_places_outside_are_refused(change, message, tmp_path):
    write_distributed(tmp_path, ARRAYS, change=lambda name, place: change)
    with pytest.raises(ValueError, match=message):
        read_torch_distributed(tmp_path)


def test_chunks_must_be_what_is_described(tmp_path):
    """All chunks of one tensor are the first one's bytes: of the same size here, of another where sizes differ."""
    write_distributed(tmp_path, {"a": np.zeros((3, 3), np.float32)}, change=lambda name, place: {"offset": 0})
    with pytest.raises(ValueError, match=r"a piece is|damaged"):
        np.asarray(read_torch_distributed(tmp_path).tensors["a"])
    described = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(described.replace(b"offsets", b"offsetz"))
    with pytest.raises(ValueError, match="damaged"):
        read_torch_distributed(tmp_path)


def test_a_description_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(os.system, "touch ran")))
    with pytest.raises(ValueError, match="when it is read, which is refused"):
        read_torch_distributed(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": 1}))
    with pytest.raises(ValueError, match="not a description of a checkpoint"):
        read_torch_distributed(tmp_path)
    with pytest.raises(ValueError, match=r"has no \.metadata"):
        read_torch_distributed(tmp_path / "other")


@pytest.mark.costly
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_folder_is_read_or_refused(data, tmp_path):
    write_distributed(tmp_path, ARRAYS, {"step": [5]})
    path = tmp_path / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=30)) + content[max(end, start) :])

    def read():
        for tensor in read_torch_distributed(tmp_path).tensors.values():
            np.asarray(tensor)

    assert len(message_of(read)) < 1000
