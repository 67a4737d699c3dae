"""Files of ``torch.save``: a zip file of a pickle and the uncompressed bytes of the tensors."""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_te._validation import checked
from jax_te.interop.torch.pickles import Global, Handlers, Record, checked_key, read_pickle
from jax_te.interop.torch.stored_tensor import DTYPES, StoredTensor

_STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"}
_STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
_STORAGES |= {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}
_STORAGE_DTYPES = {f"torch.{kind}Storage": DTYPES[dtype] for kind, dtype in _STORAGES.items()}
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
STORAGE_OF = {DTYPES[dtype]: f"{kind}Storage" for kind, dtype in _STORAGES.items()}
"""Dtype → torch's class of storages; others are in an ``UntypedStorage``."""

_NAME_LIMIT = 10**6


class Mapped:
    """A memory-mapped file: nothing is read before it is needed."""

    def __init__(self, path: Path):
        if not path.is_file():  # nor a pipe, which would block on opening
            raise ValueError(f"{path} is not a file")
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise ValueError(f"{path} is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes, self._path = memoryview(self._map), path

    def load(self) -> Any:
        """Return the value of the file, an archive; its tensors are `StoredTensor`."""
        return load_archive(self.bytes, self._path, self._map)

    def release(self) -> None:
        """Release memory of pages read; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)


@checked
def read_torch_file(path: str | Path) -> Any:
    """Return the value that ``torch.save`` wrote to a file, without torch and without running code of the file.

    Tensors are NumPy arrays over a memory map, which cannot be written to. The checksums of all of them are compared,
    which reads each once. An ``OrderedDict`` becomes a dict, a set a list. Other classes of Megatron, torch and NumPy
    become a record of their names and arguments.

    Args:
        path: path of a file of torch 1.6 or newer.

    Raises:
        ValueError: for another or a damaged file; for a file that names a function not known to be harmless.

    Source: ``torch.load(path, weights_only=True, mmap=True)``.

    >>> read_torch_file("model.pt")["linear.weight"].shape  # doctest: +SKIP
    (4, 3)
    """
    return with_arrays(open_torch_file(path), path)


def open_torch_file(path: str | Path) -> Any:
    """Return the value of `read_torch_file` with `StoredTensor` in place of arrays, which are not read yet."""
    return Mapped(Path(path)).load()


def with_arrays(value: Any, what: object) -> Any:
    """Return the value of an archive with its tensors as arrays, which compares their checksums.

    Args:
        value: value that `load_archive` returned; its dicts and lists are changed.
        what: the file, for messages.

    Raises:
        ValueError: for a damaged tensor, and infinitely nested containers.
    """
    try:
        return _read(value, {})
    except RecursionError:
        raise ValueError(f"{what} is damaged: it has containers in containers without end") from None


def _read(value: Any, read: dict[int, Any]) -> Any:
    # Values that occur several times, or inside of themselves, are read once.
    if id(value) in read:
        return read[id(value)]
    if isinstance(value, StoredTensor):
        read[id(value)] = np.asarray(value)
    elif isinstance(value, dict):
        read[id(value)] = value
        for key, item in value.items():
            value[key] = _read(item, read)
    elif isinstance(value, list):
        read[id(value)] = value
        value[:] = [_read(item, read) for item in value]
    elif isinstance(value, tuple):
        read[id(value)] = tuple(_read(item, read) for item in value)
    elif isinstance(value, Record):
        read[id(value)] = value
        value.args, value.state, value.items = (_read(each, read) for each in (value.args, value.state, value.items))
    return read.get(id(value), value)


def load_archive(data: memoryview, what: object, file: Any = None) -> Any:
    """Return the value of an archive; a tensor's checksum is compared when it is first read.

    Args:
        data: the bytes of the archive.
        what: the file, for messages.
        file: open file to seek and read in, where there is one.

    Raises:
        ValueError: see `read_torch_file`.
    """
    # For a whole file zipfile reads only the directory; a chunk in a file of several is copied for it.
    entries = _entries(data, what, file or io.BytesIO(data))
    root = next((name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl")), None)
    if root is None or not all(name.startswith(root) for name in entries):
        raise ValueError(f"{what} is not a file of torch.save: it has no data.pkl, or entries outside of its folder")
    order = entries.get(f"{root}byteorder")
    if order is not None and bytes(order.checked()) != b"little":
        raise ValueError(f"{what} was written on a big-endian machine; save it again on another one")

    def storage(persistent_id: Any) -> _Storage:
        kind, dtype, key, _, count = persistent_id
        if kind != "storage" or not isinstance(dtype, Global) or type(key) is not str or type(count) is not int:
            raise TypeError("a persistent id that is not a storage")
        # A name in the archive, never on disk.
        stored = entries.get(f"{root}data/{key}")
        known = np.dtype(np.uint8) if dtype in _UNTYPED else _STORAGE_DTYPES.get(dtype)
        if stored is None or known is None or len(stored.data) != count * known.itemsize:
            raise ValueError(f"no storage {key[:50]!r} of {count} elements of {dtype[:50]}")
        return _Storage(stored, known)

    return read_pickle(entries[f"{root}data.pkl"].checked(), what, TENSOR_HANDLERS, storage)


class _Entry:
    """The bytes of an entry of an archive, and their checksum, compared once."""

    def __init__(self, data: memoryview, crc: int, what: str):
        self.data, self._crc, self._what = data, crc, what

    def checked(self) -> memoryview:
        """Return the bytes.

        Raises:
            ValueError: for another checksum than the archive's.
        """
        # 0: torch.utils.serialization.config.save.compute_crc32=False, and metadata without a payload.
        if self._crc and zlib.crc32(self.data) != self._crc:
            raise ValueError(f"{self._what} is damaged: its bytes have another checksum than when they were written")
        self._crc = 0
        return self.data


class _Storage(NamedTuple):
    entry: _Entry
    dtype: np.dtype[Any]


def plain_storage(data: bytes, dtype: str, count: int, what: str) -> Any:
    """Return a storage of so many elements for `TENSOR_HANDLERS`, of bytes without a checksum.

    Raises:
        ValueError: for another number of bytes.
    """
    known = _STORAGE_DTYPES.get(dtype)
    if known is None or len(data) != count * known.itemsize:
        raise ValueError(f"no storage of {count} elements of {dtype[:50]}")
    return _Storage(_Entry(memoryview(data), 0, what), known)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, views: Any = None
) -> StoredTensor:
    del grad, hooks
    return _strided(storage, storage.dtype, offset, size, stride, views)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, views: Any = None
) -> StoredTensor:
    del grad, hooks
    return _strided(storage, DTYPES[dtype.removeprefix("torch.")], offset, size, stride, views)


# torch stores a view like ``x.conj()`` as the storage of ``x`` and a mark. Conjugate first: torch applies it so.
_VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"conj": np.conjugate, "neg": np.negative}


def _strided(storage: _Storage, dtype: np.dtype[Any], offset: Any, size: Any, stride: Any, views: Any) -> StoredTensor:
    """Return the tensor of a part of a storage.

    Args:
        storage, dtype, offset, size, stride: fields of a tensor, as torch stores them.
        views: torch's marks of the tensor, a bool for each name; None without.

    Raises:
        ValueError: for a part that the storage does not have, and for an unknown mark.
    """
    marks = [name for name, marked in dict(views or {}).items() if marked]
    if unknown := sorted(set(marks) - _VIEWS.keys()):
        raise ValueError(f"a tensor with the marks {', '.join(map(repr, unknown))}, whose meaning is not known here")
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(shape) != len(steps):
        raise ValueError("a tensor whose sizes are not numbers")
    count = len(storage.entry.data) // dtype.itemsize
    last = offset + sum((dim - 1) * step for dim, step in zip(shape, steps, strict=True))
    # An expanded tensor has more elements than its storage: a small file could request any amount of memory.
    if (math.prod(shape) and (last >= count or math.prod(shape) > count)) or len(shape) > 32:
        raise ValueError(f"a tensor {list(shape)[:32]} that its storage of {count} elements does not hold")
    strides = [step * dtype.itemsize for step in steps]

    def read() -> np.ndarray:
        # Of no elements: its offset may lie at the end of the storage.
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        array = np.ndarray(shape, dtype, storage.entry.checked(), offset * dtype.itemsize, strides)
        for name in marks:
            array = _VIEWS[name](array)
        return array

    return StoredTensor.of(shape, dtype, read, "a tensor")


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _ordered(items: Any = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in items}


TENSOR_HANDLERS: Handlers = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": _ordered,
    "torch.Size": tuple,
}


def _entries(data: memoryview, what: object, file: Any) -> dict[str, _Entry]:
    """Return the entries of a zip file by name.

    Raises:
        ValueError: for entries that are compressed or encrypted, outside of the file, overlapping, or duplicated.
    """
    if bytes(data[:4]) != b"PK\x03\x04":
        raise ValueError(
            f"{what} is not a zip file, as torch.save writes them since torch 1.6; let torch write an older file "
            "again: torch.save(torch.load(OLD, weights_only=True), NEW)"
        )
    try:
        infos = zipfile.ZipFile(file).infolist()
    except Exception as error:  # zipfile raises errors of many kinds for damaged files
        raise ValueError(f"{what} is damaged: {str(error)[:200]}") from None
    entries: dict[str, _Entry] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        start = info.header_offset
        header = bytes(data[start : start + 30]) if start >= end else b""
        if header[:4] != b"PK\x03\x04" or len(header) < 30 or info.filename in entries:
            raise ValueError(f"{what} is damaged: entry {info.filename[:100]!r} is above another one, or nowhere")
        begin = start + 30 + sum(struct.unpack("<HH", header[26:30]))
        end = begin + info.file_size
        packed = info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1
        if packed or info.compress_size != info.file_size or end > len(data) or len(entries) > _NAME_LIMIT:
            raise ValueError(f"{what}: entry {info.filename[:100]!r} is packed or cut off; torch.save stores entries")
        entries[info.filename] = _Entry(data[begin:end], info.CRC, f"{what}, entry {info.filename[:100]!r},")
    return entries
