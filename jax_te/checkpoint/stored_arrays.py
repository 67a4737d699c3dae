"""Reading the arrays of a checkpoint with TensorStore, in the format that Orbax writes: Zarr in an OCDBT database.

Orbax itself would read all arrays of a tree at once in an event loop, which it closes when one read fails. The other
reads then report their errors from TensorStore's threads at any later time, and only a hook of the whole process could
keep these from the screen. Here a failed read raises in this call, and no process-wide state changes.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jax_te.checkpoint.tree import STATE, Name, is_key, is_wide, stored_parts
from jax_te.typing import Array

IN_FLIGHT = 2**32
"""Maximum bytes of arrays being read at a time."""

_INDEX_CACHE = 2**27
"""Bytes of the database's index cached in memory."""

Reads: TypeAlias = dict[tuple[tuple[int, ...], ...], tensorstore.Future]
"""Pending reads of the parts of one array that this process needs, by index."""


class Database:
    """The arrays of a checkpoint, not read yet.

    Args:
        path: folder of the tree of all arrays.

    Raises:
        ValueError: if its index cannot be read.
    """

    def __init__(self, path: Path):
        # Only the index is cached: values are read once.
        self._context = tensorstore.Context({"cache_pool#index": {"total_bytes_limit": _INDEX_CACHE}})
        base = {"driver": "file", "path": f"{path}/"}
        self._spec = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#index"}
        database = tensorstore.KvStore.open(self._spec, context=self._context).result()
        files = (key.decode().rpartition("/") for key in database.list().result())
        self._names = {array for array, _, file in files if file == "zarr.json"}

    def __contains__(self, name: Name) -> bool:
        return _key(name) in self._names

    def open(self, name: Name) -> tensorstore.Future:
        """Return an array that is being opened."""
        spec = {"driver": "zarr3", "kvstore": {**self._spec, "path": f"{_key(name)}/"}}
        return tensorstore.open(spec, context=self._context, open=True, read=True)


def read_arrays(path: Path, wanted: dict[Name, jax.ShapeDtypeStruct]) -> dict[Name, Any]:
    """Return arrays of a checkpoint, each in the sharding of its description; this process reads only its own parts.

    An array of 64 bits, where JAX has none, is one of NumPy, the whole in each process.

    Args:
        path: folder of the checkpoint.
        wanted: descriptions of the arrays.

    Raises:
        ValueError: if an array is missing, does not match its description, or cannot be read.
    """
    if not wanted:
        return {}
    database = Database(path / STATE)
    absent = ["/".join(name) for name in wanted if name not in database]
    if absent:
        raise ValueError(f"{len(absent)} of {len(wanted)} arrays are not there, first {absent[0]}")
    opening = {name: database.open(name) for name in wanted}
    begun = ((name, _begin(opening[name], _as_stored(leaf), "/".join(name))) for name, leaf in wanted.items())
    return {name: _arrived(reads, wanted[name]) for name, reads in _ahead(begun, wanted)}


def _key(name: Name) -> str:
    """Return Orbax's name of an array."""
    return ".".join(stored_parts(name))


def _begin(opening: tensorstore.Future, stored: Any, name: str) -> Reads:
    """Check an array's stored metadata, start the reads of its parts, and return them."""
    store = opening.result()
    found = store.dtype.numpy_dtype, tuple(store.shape)
    if found != (stored.dtype, stored.shape):
        raise ValueError(f"{name} is {found[0]}{list(found[1])} and must be {stored.dtype}{list(stored.shape)}")
    # Devices that hold the same part get it from one read.
    return {_place(index, stored.shape): store[index].read() for index in _indices(stored)}


def _ahead(
    begun: Iterable[tuple[Name, Reads]], wanted: dict[Name, jax.ShapeDtypeStruct]
) -> Iterator[tuple[Name, Reads]]:
    """Yield reads in order, starting subsequent ones as far as `IN_FLIGHT` allows."""
    waiting: collections.deque[tuple[Name, Reads]] = collections.deque()
    in_flight = 0
    for name, reads in begun:
        waiting.append((name, reads))
        in_flight += _bytes(wanted[name])
        while in_flight > IN_FLIGHT:
            first = waiting.popleft()
            in_flight -= _bytes(wanted[first[0]])
            yield first
    yield from waiting


def _arrived(reads: Reads, leaf: jax.ShapeDtypeStruct) -> Array | np.ndarray:
    """Return an array on its devices, or in NumPy, when its parts have been read."""
    stored = _as_stored(leaf)
    parts = {place: read.result() for place, read in reads.items()}
    if is_wide(leaf.dtype):
        return next(iter(parts.values()))
    array = jax.make_array_from_callback(
        stored.shape, stored.sharding, lambda index: parts[_place(index, stored.shape)], dtype=stored.dtype
    )
    if not is_key(leaf.dtype):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.zeros((), leaf.dtype)))


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the size of the parts of an array that this process reads."""
    stored = _as_stored(leaf)
    if is_wide(leaf.dtype):
        return prod(stored.shape) * stored.dtype.itemsize
    shard = stored.sharding.shard_shape(stored.shape)
    return len(_indices(stored)) * prod(shard) * stored.dtype.itemsize


def _indices(stored: Any) -> list[Any]:
    """Return the indices of the parts that this process's devices hold, each once."""
    if is_wide(stored.dtype):
        return [(slice(None),) * len(stored.shape)]
    of_devices = stored.sharding.addressable_devices_indices_map(stored.shape).values()
    return list({_place(index, stored.shape): index for index in of_devices}.values())


def _place(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _as_stored(leaf: jax.ShapeDtypeStruct) -> Any:
    """Return the description of an array as stored; for typed keys that of their data."""
    if not is_key(leaf.dtype):
        return leaf
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
