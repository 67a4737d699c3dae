"""Writing of ``torch.distributed.checkpoint`` checkpoints without torch: a file for each chunk, and a description."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import checked
from jax_te._whole_files import NewFiles, whole_or_nothing
from jax_te.interop.torch.read_distributed import METADATA
from jax_te.interop.torch.stored_tensor import Piece, StoredTensor
from jax_te.interop.torch.write_file import TORCH_NAMES, pickled, write_archive

_DESCRIPTION = "torch.distributed.checkpoint.metadata"


@checked
def write_torch_distributed(folder: str | Path, entries: Mapping[str, Any]) -> None:
    """Write a checkpoint for ``torch.distributed.checkpoint.load``, without torch.

    Every chunk gets its own file, as with ``FileSystemWriter(single_file_per_rank=False)``, and chunks are read and
    written one after the other. The files replace an older checkpoint in the folder when all are complete; a call that
    raises before leaves none of them. Files that end in ``.part``, of a call that was killed, stay: they may be those
    of a program that is still writing.

    Args:
        folder: folder to write; made if missing.
        entries: values by name. NumPy and JAX arrays become tensors, whose parts any number of ranks can load; tensors
            from `read_torch_distributed` keep their chunks. Other values that `write_torch_file` takes become objects.

    Raises:
        TypeError: for other values, and for dtypes that torch lacks.
        OSError: if a file cannot be written, or cannot get its name: the message says what to do.

    Source: ``torch.distributed.checkpoint.FileSystemWriter``.

    >>> write_torch_distributed("iter_0000100", {"weight": np.zeros((2, 3), np.float32)})  # doctest: +SKIP
    """
    folder = Path(folder)
    older = [*folder.glob("*.distcp")]
    # Rank numbers in names have no meaning to readers: here they distinguish the files from those they replace, and
    # from parts, which another program may be writing.
    rank = next(n for n in itertools.count() if not any(folder.glob(f"__{n}_*.distcp*")))
    files = (f"__{rank}_{number}.distcp" for number in itertools.count())
    with whole_or_nothing(folder) as new:
        metadata = _write_entries(new, files, entries)
        new.part(METADATA).write_bytes(metadata)  # the last: it names the others
    for file in older:
        file.unlink(missing_ok=True)  # the description names others


def _write_entries(new: NewFiles, files: Iterator[str], entries: Mapping[str, Any]) -> bytes:
    """Write the files of all entries, and return their description.

    Args:
        new: new files of the folder.
        files: names for them.
        entries: values by name.
    """
    described: list[bytes] = []
    places: list[bytes] = []
    for name, value in entries.items():
        described += [_plain(name)]
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            chunks = []
            for number, piece in enumerate(_pieces(value)):
                begin, shape = _size(piece.offsets), _size(piece.shape)
                chunks.append(_made("ChunkStorageMetadata", _dict({"offsets": begin, "sizes": shape})))
                places += _written(new, next(files), name, piece.read(), {"offset": begin, "index": _plain(number)})
            fields = {"properties": _properties(value.dtype), "size": _size(value.shape)}
            chunks_list = b"](" + b"".join(chunks) + b"e"
            described += [_made("TensorStorageMetadata", _dict(fields | {"chunks": chunks_list}))]
        else:
            described += [_made("BytesStorageMetadata", b"}")]
            places += _written(new, next(files), name, value, {"offset": b"N", "index": b"N"})
    tables = {"state_dict_metadata": _table(described), "storage_data": _table(places)}
    # Path of each entry through the dicts of a state: here there is one dict.
    tables["planner_data"] = _plain({name: (name,) for name in entries})
    return b"\x80\x02" + _made("Metadata", _dict(tables)) + b"."


def _pieces(value: Any) -> tuple[Piece, ...]:
    if isinstance(value, StoredTensor):
        return value.pieces
    return (Piece((0,) * len(value.shape), tuple(value.shape), lambda: value),)


def _written(new: NewFiles, file: str, name: str, value: Any, index: Mapping[str, bytes]) -> list[bytes]:
    """Return the entry of a chunk or an object in the table of places, once its file is written."""
    part = new.part(file)
    write_archive(part, Path(file).stem, value)
    place = {"relative_path": file, "offset": 0, "length": part.stat().st_size}
    return [
        _made("MetadataIndex", _dict({"fqn": _plain(name), **index})),
        _made("_StorageInfo", _plain(place), module="torch.distributed.checkpoint.filesystem"),
    ]


# Opcodes of pickle: an object is made without a call of its constructor, and then given its state.
def _made(name: str, state: bytes, *, module: str = _DESCRIPTION) -> bytes:
    return f"c{module}\n{name}\n".encode() + b")\x81" + state + b"b"


def _plain(value: Any) -> bytes:
    return b"".join(pickled(value, []))


def _table(items: Iterable[bytes]) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def _dict(fields: Mapping[str, bytes]) -> bytes:
    return _table(part for name, value in fields.items() for part in (_plain(name), value))


def _size(shape: tuple[int, ...]) -> bytes:
    return b"ctorch\nSize\n(" + _plain(tuple(shape)) + b"tR"


def _properties(dtype: Any) -> bytes:
    # torch reads only the dtype of these; the others have the values of any tensor without a gradient.
    encoding = f"c{_DESCRIPTION}\n_MEM_FORMAT_ENCODING\n".encode() + b"(" + _plain(0) + b"tR"
    name = TORCH_NAMES[np.dtype(dtype)].encode()
    return _made("TensorProperties", b"(ctorch\n" + name + b"\nctorch\nstrided\n\x89" + encoding + b"\x89t")
