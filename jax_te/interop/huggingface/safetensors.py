"""Files of the safetensors format: the length of a header, the header in JSON, the bytes of the tensors."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{
        f"{sign}{bits}": np.dtype(f"{kind}{bits}")
        for sign, kind in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    "BOOL": np.dtype(np.bool_),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

MAX_JSON = 100_000_000
"""Maximum bytes of a header, which is the format's own limit, and of a JSON file."""

TensorPlan = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Name, dtype and shape of a tensor to write."""


def read_json(text: bytes, what: object) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: for text that is not an object, is nested too deeply or has a name twice; its message begins with
            ``what``.

    >>> read_json(b'{"a": 1}', "a header")
    {'a': 1}
    """
    try:
        values = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, got {str(values)[:50]!r}")
    return values


class TensorFile:
    """The tensors of one file, over a memory map: nothing is read before a tensor is.

    Attributes:
        tensors: name → read-only array.

    Raises:
        ValueError: for a file that is not whole, or whose header does not describe its bytes.
    """

    def __init__(self, path: Path):
        if not path.is_file():  # nor a pipe, which would block on opening
            raise ValueError(f"{path} is not a file")
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_JSON):
                raise ValueError(f"{path} is damaged: {size} bytes cannot hold a header of {length}")
            header = read_json(file.read(length), f"the header of {path}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header.pop("__metadata__", None)
        data = np.frombuffer(self._map, np.uint8)[8 + length :]
        self.tensors: dict[str, np.ndarray] = {}
        end = 0
        # In the order of their bytes: the format allows no gap and no overlap.
        for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
            begin = end
            dtype, shape, end = _checked(path, name, entry, begin, data.size)
            self.tensors[name] = data[begin:end].view(dtype).reshape(shape)
        if end != data.size:
            raise ValueError(f"{path} is damaged: its tensors take {end} bytes, and it has {data.size} for them")

    def release(self) -> None:
        """Release memory of pages read; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)


def write_file(path: Path, plan: list[TensorPlan], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a file of tensors one by one, so that no two need be in memory.

    Args:
        path: path of the file.
        plan: plan of all tensors.
        tensors: the same, in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, dtype, shape in plan:
        begin, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), (given, array) in zip(plan, tensors, strict=True):
            if (name, dtype, shape) != (given, array.dtype, array.shape):
                raise ValueError(f"tensor {given} {array.dtype}{array.shape} in the place of {name} {dtype}{shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes.

    >>> nbytes(np.dtype("float32"), (2, 3))
    24
    """
    return math.prod(shape) * dtype.itemsize


def shards(plan: list[TensorPlan], limit: int) -> Iterator[list[TensorPlan]]:
    """Return the plans of files of at most ``limit`` bytes of tensors each, or of one tensor.

    >>> plan = [(name, np.dtype("float32"), (2,)) for name in "abc"]
    >>> [len(file) for file in shards(plan, 16)]
    [2, 1]
    """
    file: list[TensorPlan] = []
    size = 0
    for tensor in plan:
        more = nbytes(*tensor[1:])
        if file and size + more > limit:
            yield file
            file, size = [], 0
        file.append(tensor)
        size += more
    yield file


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        # Readers that use the first one would see another file than readers that use the last.
        raise ValueError("a name is there twice")
    return values


def _offsets(entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int for at in offsets):
        return offsets[0], offsets[1]
    return (-1, -1)  # refused by `_checked`


def _checked(path: Path, name: str, entry: Any, begin: int, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and the end of the bytes of a tensor, which must begin at ``begin``."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, (first, end) = entry.get("dtype"), entry.get("shape"), _offsets(entry)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{path}: {name[:200]!r} has dtype {str(dtype)[:50]!r}; known: {', '.join(_DTYPES)}")
    if (
        not isinstance(shape, list)
        or not all(type(dim) is int and 0 <= dim <= size for dim in shape)
        or len(shape) > 32
    ):
        raise ValueError(f"{path} is damaged: {name[:200]!r} has shape {str(shape)[:100]}")
    if first != begin or end - begin != nbytes(_DTYPES[dtype], tuple(shape)) or end > size:
        raise ValueError(
            f"{path} is damaged: {name[:200]!r}, {dtype}{shape}, is at {str(entry.get('data_offsets'))[:100]} of "
            f"{size} bytes, and the tensor before it ends at {begin}"
        )
    return _DTYPES[dtype], tuple(shape), end
