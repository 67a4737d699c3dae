"""Files of tokens, mapped into memory and not read: NumPy's ``.npy``, and Megatron's ``.bin`` with ``.idx``."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of integers; 6 and 7 are floats."""

TOKEN_FILES = (".npy", ".idx", ".bin")
"""Endings of files of tokens."""


def token_file(path: Path) -> np.ndarray | None:
    """Return the tokens of a file, integers ``[n]`` over a memory map; None if it is a file of another kind.

    ``.npy`` holds a 1-D array of integers; one with Python objects is refused before anything of it is unpickled. Of
    Megatron's pair either file may be named; the tokens are those of all its documents, in the file's order.

    Raises:
        ValueError: for a damaged file, and one of other contents.

    Source: ``megatron.core.datasets.indexed_dataset``.
    """
    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    if path.suffix.lower() == ".npy":
        return _npy(path)
    # Without this, a .bin whose .idx was left behind would be read as text, a token for each byte.
    if path.suffix.lower() in (".idx", ".bin"):
        return _megatron(index, tokens)
    return None


def _npy(path: Path) -> np.ndarray:
    try:
        # Not np.load, which also reads zip files and, if allowed, pickles.
        found = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the header is parsed as Python, whose tokenizer has errors of its own
        raise ValueError(f"{path} is not a .npy file of tokens: {str(error)[:200]}") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold a 1-D array of integers, and holds {found.dtype} {found.shape}")
    return found


def _megatron(index: Path, tokens: Path) -> np.ndarray:
    for path in (index, tokens):
        if not path.is_file():
            raise ValueError(
                f"{path} is not there; Megatron's data are two files, {index.name} and {tokens.name}. Put it beside "
                "the other; text needs a file name with another ending"
            )
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{index} is not an index of Megatron's data (MMapIndexedDataset)")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{index} has version {version} and dtype code {code}; version 1 and codes {', '.join(map(str, _DTYPES))}, "
            "integers, are read"
        )
    dtype = np.dtype(_DTYPES[code])
    # Of each sequence its length, int32, and its place, int64; then documents, and for some data a mode, int8.
    size, least = index.stat().st_size, _HEADER.size + 12 * sequences + 8 * documents
    if size not in (least, least + sequences) or not sequences:
        raise ValueError(f"{index} has {size} bytes, and its {sequences} sequences and {documents} documents {least}")
    # Sums, not a comparison of every place, which would take twice the index's size in memory.
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,))
    places = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    there, total = tokens.stat().st_size, int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    ends = int(places[0]), int(places[-1]) + int(lengths[-1]) * dtype.itemsize
    if total != there or ends != (0, there) or not there:
        raise ValueError(
            f"{index} describes {total} bytes of tokens, from {ends[0]} to {ends[1]}, and {tokens.name} has {there}; "
            "only data without gaps are read"
        )
    return np.memmap(tokens, dtype, "r")
