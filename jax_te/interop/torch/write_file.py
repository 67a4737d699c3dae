"""Writing of ``torch.save`` files without torch: pickles of protocol 2 in zip files with uncompressed entries."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_te._validation import checked
from jax_te._whole_files import whole_or_nothing
from jax_te.interop.torch.read_file import STORAGE_OF
from jax_te.interop.torch.stored_tensor import DTYPES, Tensor

TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""torch's names by dtype."""

_ALIGNMENT = 64
_WHEN = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all entries: the same tensors give the same file."""


class _Written(NamedTuple):
    key: str
    tensor: Tensor


@checked
def write_torch_file(path: str | Path, value: Any) -> None:
    """Write a file for ``torch.load(path, weights_only=True)``, without torch.

    Tensors are written one by one; the file gets its name when it is complete, and a call that raises leaves none.

    Args:
        path: path of the file; its folder is made if missing.
        value: dicts with str keys, lists, tuples, str, int, float, bool, None, and NumPy and JAX arrays, which become
            tensors.

    Raises:
        TypeError: for other values, and for dtypes that torch lacks.

    Source: ``torch.save``.

    >>> write_torch_file("model.pt", {"weight": np.zeros((2, 3), np.float32)})  # doctest: +SKIP
    """
    path = Path(path)
    with whole_or_nothing(path.parent) as new:
        write_archive(new.part(path.name), path.stem or "archive", value)


def write_archive(path: Path, root: str, value: Any) -> None:
    """Write the contents of such a file.

    Args:
        path: path to write to.
        root: name of the folder of the archive.
        value: see `write_torch_file`.
    """
    tensors: list[_Written] = []
    described = b"\x80\x02" + b"".join(pickled(value, tensors)) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _add(archive, f"{root}/data.pkl", described)
        _add(archive, f"{root}/byteorder", b"little")
        for key, tensor in tensors:
            array = np.ascontiguousarray(np.asarray(tensor))
            _add(archive, f"{root}/data/{key}", array.reshape(-1).view(np.uint8).data)
        _add(archive, f"{root}/version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    info = zipfile.ZipInfo(name, _WHEN)
    assert archive.fp is not None
    large = memoryview(data).nbytes >= zipfile.ZIP64_LIMIT // 2
    # Tensors begin at multiples of 64 bytes, so that torch can map them: an unused extra field fills the gap. zipfile
    # puts 64-bit sizes before it.
    begin = archive.fp.tell() + 30 + len(name.encode()) + 20 * large
    fill = -(begin + 4) % _ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, fill) + b"Z" * fill
    with archive.open(info, "w", force_zip64=large) as entry:
        entry.write(data)


def pickled(value: Any, tensors: list[_Written]) -> Iterator[bytes]:
    """Return the opcodes that build a value; tensors go to the list."""
    if isinstance(value, Mapping):
        yield b"}("
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"keys must be str, got {key!r}")
            yield _text(key)
            yield from pickled(item, tensors)
        yield b"u"
    elif isinstance(value, list | tuple):
        yield b"](" if isinstance(value, list) else b"("
        for item in value:
            yield from pickled(item, tensors)
        yield b"e" if isinstance(value, list) else b"t"
    elif value is None or isinstance(value, bool):
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        # One byte more than some values need, so that all signs are represented.
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        yield b"\x8a" + bytes([len(data)]) + data
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        yield _text(value)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield from _tensor(value, tensors)
    else:
        raise TypeError(f"a file of torch.save gets dicts, lists, plain values and arrays, got {type(value).__name__}")


def _tensor(value: Any, tensors: list[_Written]) -> Iterator[bytes]:
    dtype, shape = np.dtype(value.dtype), tuple(value.shape)
    # Older torch has no storages of the newer dtypes, which all use untyped ones.
    if dtype not in TORCH_NAMES:
        raise TypeError(f"torch has no dtype {dtype}; convert the array to one of {', '.join(DTYPES)}")
    key = str(len(tensors))
    tensors.append(_Written(key, value))
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    count, typed = int(np.prod(shape)), dtype in STORAGE_OF
    yield b"ctorch._utils\n_rebuild_tensor_v2\n(" if typed else b"ctorch._utils\n_rebuild_tensor_v3\n("
    kind = STORAGE_OF[dtype] if typed else "UntypedStorage"
    module = b"ctorch\n" if typed else b"ctorch.storage\n"
    count = count if typed else count * dtype.itemsize
    yield b"(" + _text("storage") + module + kind.encode() + b"\n" + _text(key) + _text("cpu")
    yield from pickled(count, [])
    yield b"tQK\x00"  # the storage, and an offset of 0
    yield from pickled(shape, [])
    yield from pickled(tuple(strides), [])
    yield b"\x89ccollections\nOrderedDict\n)R"  # no gradient, no hooks
    if not typed:
        yield b"ctorch\n" + TORCH_NAMES[dtype].encode() + b"\n"
    yield b"tR"


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data
