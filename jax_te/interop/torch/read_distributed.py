"""Checkpoints of ``torch.distributed.checkpoint``: a pickled description, and files of concatenated chunks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_te._validation import checked
from jax_te.interop.torch.pickles import Global, Record, read_pickle
from jax_te.interop.torch.read_file import Mapped, load_archive, with_arrays
from jax_te.interop.torch.stored_tensor import DTYPES, Piece, StoredTensor

METADATA = ".metadata"
"""The file of the description."""

_FILE = re.compile(r"[\w.-]{1,200}\.distcp")


class Distributed(NamedTuple):
    """Contents of a checkpoint of ``torch.distributed``.

    Args:
        tensors: tensors by their names.
        others: functions that read the other values, by name.
        files: open files, to be released when a tensor has been used.
    """

    tensors: dict[str, StoredTensor]
    others: dict[str, Callable[[], Any]]
    files: list[Mapped]


@checked
def read_torch_distributed(folder: str | Path) -> Distributed:
    """Return the tensors of a checkpoint of ``torch.distributed.checkpoint``, merged, without torch.

    ``np.asarray`` reads a tensor chunk by chunk and compares the chunks' checksums; other values are read when their
    function is called.

    Args:
        folder: folder with a file ``.metadata`` and files ``*.distcp``, as ``FileSystemWriter`` writes them.

    Returns:
        The tensors and the rest by name, and the files.

    Raises:
        ValueError: for a damaged checkpoint, chunks that are packed, and names of files outside of the folder.

    Source: ``torch.distributed.checkpoint.FileSystemReader``.

    >>> np.asarray(read_torch_distributed("iter_0000100").tensors["weight"]).shape  # doctest: +SKIP
    (8, 4)
    """
    folder = Path(folder)
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{folder} has no {METADATA}; the folder that torch.distributed.checkpoint.save wrote has it")
    described = read_pickle(Mapped(path).bytes, path, {"torch.Size": tuple})
    try:
        entries, places = _tables(described)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a description of a checkpoint of torch.distributed ({error})") from None
    files: dict[str, Mapped] = {}
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, Callable[[], Any]] = {}
    for name, entry in entries.items():
        what, pieces = f"{path}: {name[:200]}", []
        if entry.get("chunks") is None:  # pickled objects, such as _extra_state
            others[name] = functools.partial(_object, folder, places.get((name, None)), files, what)
            continue
        shape, dtype = _sizes(entry.get("size"), what), _dtype(entry, what)
        for chunk in entry.get("chunks"):
            offsets, sizes = (_sizes(chunk.get(field), what) for field in ("offsets", "sizes"))
            stored = _Chunk(_place(folder, places.get((name, offsets)), files, what), what)
            pieces.append(Piece(offsets, sizes, stored.read))
        tensors[name] = StoredTensor(shape, dtype, pieces, what)
    return Distributed(tensors, others, list(files.values()))


def _tables(described: Any) -> tuple[dict[str, Record], dict[Any, Record]]:
    """Return the entries by name, and the places of chunks by name and offsets."""
    entries, stored = described.get("state_dict_metadata"), described.get("storage_data")
    if not all(isinstance(table, Mapping) for table in (entries, stored)):
        raise ValueError("it lacks state_dict_metadata or storage_data")
    if not all(type(name) is str and isinstance(entry, Record) for name, entry in entries.items()):
        raise ValueError("an entry has no name")
    return dict(entries), {(key.get("fqn"), key.get("offset")): place for key, place in stored.items()}


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**40 for size in value):
        raise ValueError(f"{what} is damaged: sizes {str(value)[:100]}")
    return value


def _dtype(entry: Record, what: str) -> np.dtype[Any]:
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    name = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(name, Global) or name.removeprefix("torch.") not in DTYPES:
        raise ValueError(f"{what} has dtype {str(name)[:50]}; known: {', '.join(DTYPES)}")
    return DTYPES[name.removeprefix("torch.")]


def _place(folder: Path, place: Any, files: dict[str, Mapped], what: str) -> memoryview:
    """Return the bytes of a chunk."""
    get = place.get if isinstance(place, Record) else {}.get
    name, offset, length = (get(field) for field in ("relative_path", "offset", "length"))
    # A name, not a path: files that the description names are read, and must be in this folder.
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{what} is in {str(name)[:200]!r}, which is not a name of a .distcp file")
    if get("transform_descriptors"):
        raise ValueError(f"{what} is packed ({str(get('transform_descriptors'))[:100]}); save it without extensions")
    # One memory map for each file, whatever its number of chunks.
    if name not in files:
        files[name] = Mapped(folder / name)
    data = files[name].bytes
    if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= len(data):
        raise ValueError(f"{what} is damaged: {name} has {len(data)} bytes, and it is at {offset} of {length}")
    return data[offset : offset + length]


def _object(folder: Path, place: Any, files: dict[str, Mapped], what: str) -> Any:
    return with_arrays(load_archive(_place(folder, place, files, what), what), what)


class _Chunk:
    """A chunk of a tensor, which is a separate archive, opened once so that its checksum is compared once.

    A chunk of stacked layers is read for each of them.
    """

    def __init__(self, data: memoryview, what: str):
        self._data, self._what = data, what

    @functools.cached_property
    def _tensor(self) -> StoredTensor:
        found = load_archive(self._data, self._what)
        if not isinstance(found, StoredTensor):
            raise ValueError(f"{self._what} is damaged: a chunk is not a tensor")
        return found

    def read(self) -> np.ndarray:
        return np.asarray(self._tensor)
