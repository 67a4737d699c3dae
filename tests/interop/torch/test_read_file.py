"""Files of torch.save without torch: what is written is read; what would run code or ask for too much is refused."""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_te.interop.torch import open_torch_file, read_torch_file, write_torch_file
from jax_te.interop.torch.pickles import Record, read_pickle

DTYPES = ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "uint16", "float8_e4m3fn", "float8_e5m2"]


def archive(path, pickled, storages=(), *, root="archive", extra=None, compression=zipfile.ZIP_STORED):
    """Write a file as torch.save does, with any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr(f"{root}/data.pkl", pickled)
        for key, data in enumerate(storages):
            file.writestr(f"{root}/data/{key}", data)
        for name, data in (extra or {}).items():
            file.writestr(name, data)
    return path


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"\x8a" + bytes([9]) + value.to_bytes(9, "little", signed=True)


def tensor(count=4, offset=0, size=(4,), stride=(1,), key="0", kind="FloatStorage"):
    """The pickle of one tensor."""
    sizes = [b"(" + b"".join(map(number, each)) + b"t" for each in (size, stride)]
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"
    pickled = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes[0] + sizes[1]
    return b"\x80\x02" + pickled + b"\x89ccollections\nOrderedDict\n)RtR."


FOUR = np.arange(4, dtype=np.float32).tobytes()


def message_of(read, *args):
    """What a call is refused with; nothing if it is not."""
    try:
        read(*args)
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_written_is_read(tmp_path):
    arrays = {name: np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name, name)) for name in DTYPES}
    arrays |= {"scalar": np.full((), 2.5, np.float32), "empty": np.zeros((0, 3), np.float32), "jax": jnp.arange(3.0)}
    arrays["columns"] = arrays["float32"].T
    value = {"arrays": arrays, "plain": [1, -300, 2**70, 1.5, None, True, False, "½", [], {}], "pair": (1, "x")}
    write_torch_file(tmp_path / "a.pt", value)
    again = read_torch_file(tmp_path / "a.pt")
    assert (again["plain"], again["pair"], list(again["arrays"])) == (value["plain"], value["pair"], list(arrays))
    for name, array in arrays.items():
        got = again["arrays"][name]
        assert got.dtype == array.dtype, name
        np.testing.assert_array_equal(got, np.asarray(array))
        assert not got.size or not got.flags.writeable
    # Every entry begins at a multiple of 64 bytes, so that torch can map the file.
    data = (tmp_path / "a.pt").read_bytes()
    for info in zipfile.ZipFile(tmp_path / "a.pt").infolist():
        start = info.header_offset
        assert not (start + 30 + sum(struct.unpack("<HH", data[start + 26 : start + 30]))) % 64
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def flipped(path, needle):
    """Flip a bit of the bytes that are stored in a file."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at + 3] ^= 0x10
    path.write_bytes(data)


def test_a_tensor_with_another_checksum_is_refused(tmp_path):
    path = archive(tmp_path / "a.pt", tensor(), [FOUR])
    assert read_torch_file(path).tolist() == [0, 1, 2, 3]
    flipped(path, FOUR)
    with pytest.raises(ValueError, match=r"a\.pt, entry 'archive/data/0', is damaged: its bytes have another checksum"):
        read_torch_file(path)
    lazy = open_torch_file(path)  # which reads nothing of it, and so finds nothing
    assert lazy.shape == (4,)
    with pytest.raises(ValueError, match="another checksum"):
        np.asarray(lazy)


def test_a_file_without_checksums_is_read(tmp_path):
    """torch.utils.serialization.config.save.compute_crc32 = False writes zeros."""
    path = archive(tmp_path / "a.pt", tensor(), [FOUR])
    data = bytearray(path.read_bytes())
    crc = struct.pack("<I", zlib.crc32(FOUR))
    path.write_bytes(data.replace(crc, bytes(4)))
    assert read_torch_file(path).tolist() == [0, 1, 2, 3]


def test_an_array_that_is_copied_can_be_written_to(tmp_path):
    lazy = open_torch_file(archive(tmp_path / "a.pt", tensor(), [FOUR]))
    assert np.array(lazy).flags.writeable
    assert not np.asarray(lazy).flags.writeable


def test_strided_and_shared_storages_are_read(tmp_path):
    path = archive(tmp_path / "a.pt", tensor(offset=1, size=(2,), stride=(2,)), [FOUR])
    assert read_torch_file(path).tolist() == [1, 3]


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"a": np.zeros(2, "datetime64[s]")}])
def test_what_torch_does_not_read_is_not_written(value, tmp_path):
    with pytest.raises(TypeError, match=r"str|plain values|no dtype"):
        write_torch_file(tmp_path / "a.pt", value)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "model.pt").mkdir()
    with pytest.raises(OSError, match=r"model\.pt"):
        write_torch_file(tmp_path / "model.pt", {"a": np.ones(2, np.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_known_classes_are_records(tmp_path):
    dictionary = pickle.dumps(OrderedDict(a=1), protocol=2)
    assert read_pickle(dictionary, "it", {"collections.OrderedDict": dict}) == {"a": 1}
    found = read_pickle(pickle.dumps({"when": io.BytesIO(b"x"), "random": np.arange(3)}), "it", {})
    assert isinstance(found["when"], Record)
    assert isinstance(found["random"], Record)


class Runs:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "args"),
    [(os.system, ("touch ran",)), (eval, ("open('ran', 'w')",)), (getattr, (os, "system")), (open, ("ran", "w"))],
    ids=["os.system", "eval", "getattr", "open"],
)
def test_a_call_is_refused_by_its_name(function, args, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if function is getattr:
        args = ("text", "format")
    pickled = pickle.dumps({"model": Runs(function, *args)}, protocol)
    with pytest.raises(ValueError, match=rf"'[\w.]*\.{function.__name__}' when it is read, which is refused"):
        read_torch_file(archive("a.pt", pickled))
    assert not (tmp_path / "ran").exists()


class WithItems:
    """Pickled as an OrderedDict called with its items, as Python 2 pickles one."""

    def __init__(self, *items):
        self.items = items

    def __reduce__(self):
        return OrderedDict, ([*map(list, self.items)],)


def test_each_item_of_an_ordered_dict_is_kept_or_refused(tmp_path):
    def read(*items):
        return open_torch_file(archive(tmp_path / "it.pt", pickle.dumps(WithItems(*items), protocol=2)))

    assert read((0, "first"), ("b", 1), ((1, "c"), 2)) == {0: "first", "b": 1, (1, "c"): 2}
    assert "key of a dict that is not a plain value" in message_of(read, ("a", 1), (((1,),), 2))


def test_state_does_not_reach_what_handlers_are():
    """BUILD with a state of attributes, on a name: pickle's own reader would set attributes of the function."""
    pickled = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}" + text("__name__") + text("x") + b"sb."
    with pytest.raises(ValueError, match="damaged"):
        read_pickle(pickled, "a file", {"torch._utils._rebuild_tensor_v2": print})


DEEP = b"\x80\x02" + b"(" * 5000 + b"t" * 5000
BAD = {
    "a nested key": DEEP + b"}" + DEEP[2:] + b"Ns.",
    "no end": b"\x80\x02N",
    "an empty stack": b"\x80\x020.",
    "a length beyond the end": b"\x80\x02X" + struct.pack("<I", 2**31) + b"a.",
    "an unknown opcode": b"\x80\x02\xff.",
    "an old class": b"\x80\x02(ios\nsystem\n.",
    "a memo that is not there": b"\x80\x02j\xff\xff\xff\xff.",
    "a memo of a large number": b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xfe.",
    "a byte array": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "another storage": tensor(key="../data.pkl"),
    "a storage that is not there": tensor(key="7"),
    "another size": tensor(count=400),
    "behind the end": tensor(offset=1),
    "an expanded one": tensor(size=(10**9, 10**9), stride=(0, 0)),
    "a negative stride": tensor(stride=(-1,)),
    "an unknown storage": tensor(kind="SecretStorage"),
}


@pytest.mark.parametrize("pickled", BAD.values(), ids=BAD)
def test_a_bad_pickle_is_one_error(pickled, tmp_path):
    with pytest.raises(ValueError, match=r"a\.pt") as error:
        read_torch_file(archive(tmp_path / "a.pt", pickled, [FOUR]))
    assert len(str(error.value)) < 1000


def test_bad_archives_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    cases = {
        "is packed or cut off": {"compression": zipfile.ZIP_DEFLATED},
        "entries outside of its folder": {"extra": {"../other": b"x"}},
        "big-endian": {"extra": {"archive/byteorder": b"big"}},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            read_torch_file(archive(path, tensor(), [FOUR], **changes))
    for content, message in {
        b"": "is empty",
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.": r"not a zip file.*torch\.save\(torch\.load",
        b"PK\x03\x04" + bytes(100): "damaged",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_torch_file(path)
    with pytest.raises(ValueError, match="not a file"):
        read_torch_file(tmp_path)


def test_entries_above_each_other_are_refused(tmp_path):
    """Two entries of the directory that name the same bytes: a small file with any number of large tensors."""
    path = archive(tmp_path / "a.pt", tensor(), [FOUR, FOUR])
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\x01\x02")
    first = data.rindex(b"PK\x01\x02", 0, second)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    with pytest.raises(ValueError, match="above another one"):
        read_torch_file(path)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_is_read_or_refused(data, tmp_path):
    path = tmp_path / "a.pt"
    write_torch_file(path, {"model": {"a": np.ones((2, 3), np.float32), "b": [1, "x"]}, "more": (None, 2.0)})
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=30)) + content[max(end, start) :])
    assert len(message_of(read_torch_file, path)) < 1000


@settings(max_examples=60, deadline=None, database=None)
@given(
    pickled=st.binary(max_size=60)
    | st.lists(st.sampled_from([tensor(), *list(BAD.values())[1:]]), max_size=3).map(b"".join)
)
def test_any_pickle_is_read_or_refused(pickled):
    for content in (pickled, b"\x80\x02" + pickled + b"."):
        assert len(message_of(read_pickle, content, "a pickle", {"collections.OrderedDict": dict})) < 1000
