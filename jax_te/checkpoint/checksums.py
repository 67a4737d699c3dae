"""Checksums of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_te.checkpoint.host import PINNED
from jax_te.checkpoint.tree import NO_MESH, Name, key_data_or_self
from jax_te.typing import Array

SMALL = 2**20
"""The largest number of elements whose checksum the host computes."""


def checksums(leaves: dict[Name, Any]) -> dict[str, int]:
    """Return a checksum of each leaf: 32 bits, that do not depend on the leaf's sharding.

    Any change of one element changes it, and so does (except for one case in 2**32) a permutation of elements.

    Args:
        leaves: arrays by name, of JAX or NumPy.

    >>> checksums({("a",): jnp.arange(4)}) == checksums({("a",): jnp.arange(4)[::-1]})
    False
    """
    return start_checksums(leaves, leaves)()


def start_checksums(leaves: dict[Name, Any], copies: dict[Name, Any]) -> Callable[[], dict[str, int]]:
    """Return a function that waits for `checksums`, which are started here: a state may be donated meanwhile.

    Args:
        leaves: arrays by name, of which those that are large are summed where they are.
        copies: the same arrays or copies of them; the host reads small ones here when it comes to them.

    >>> finish = start_checksums({("a",): jnp.arange(4)}, {("a",): np.arange(4, dtype=np.int32)})
    >>> finish() == checksums({("a",): jnp.arange(4)})
    True
    """
    sums: dict[str, Any] = {}
    with jax.set_mesh(NO_MESH):
        held = {"/".join(name): _data(leaf) for name, leaf in copies.items()}
        names = {"/".join(name): leaf for name, leaf in leaves.items()}
        # A NumPy array may be changed meanwhile.
        arrays = {name: _data(leaf) if isinstance(leaf, jax.Array) else held[name] for name, leaf in names.items()}
        small = {name: held[name] for name, leaf in arrays.items() if _is_small(leaf)}
        large = {name: leaf for name, leaf in arrays.items() if name not in small}
        # Copies to the host start together, and are ready when they are needed.
        for leaf in small.values():
            if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind != PINNED:
                leaf.copy_to_host_async()
        # One program for each leaf, because leaves may be on different meshes. A GPU has them all in its queue before
        # the first result is asked for; XLA's CPU runtime aborts when programs with collectives wait too long for one
        # of its threads, so there each is waited for before the next starts.
        for name, leaf in large.items():
            sums[name] = _sum_on_devices(leaf)
            if any(device.platform == "cpu" for device in leaf.devices()):
                sums[name].block_until_ready()

    def finish() -> dict[str, int]:
        values = {name: np.asarray(leaf) for name, leaf in small.items()}
        found = _sums_on_host(values) | jax.device_get(sums)
        return {name: int(found[name]) for name in held}

    return finish


def _data(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        # Not as an array of JAX, which would have 32 bits where this one has 64. A file has the bytes in this order.
        return np.asarray(leaf, leaf.dtype.newbyteorder("="))
    return key_data_or_self(leaf)


def _is_small(leaf: Any) -> bool:
    """Return whether the host computes the checksum: it reads a small array sooner than a program is compiled."""
    if isinstance(leaf, np.ndarray):
        return True
    return leaf.size <= SMALL and (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _sums_on_host(arrays: dict[str, np.ndarray]) -> dict[str, np.uint32]:
    """Return the checksums of arrays, in few calls of NumPy: a state has hundreds of arrays of some bytes."""
    sums, batch, size = dict[str, np.uint32](), dict[str, np.ndarray](), 0
    for name, values in arrays.items():
        flat = values.reshape(-1)
        words = flat.view({1: np.uint8, 2: np.uint16}.get(flat.itemsize, np.uint32))
        if words.size > 2 * SMALL:
            sums[name] = _sum_in_parts(words)
            continue
        words = words.astype(np.uint32)
        if size + words.size > 2**16:  # words, with all that is computed from them, stay in a cache
            sums, batch, size = sums | _sums_of_words(batch), {}, 0
        batch[name] = words
        size += words.size
    return sums | _sums_of_words(batch)


def _sums_of_words(batch: dict[str, np.ndarray]) -> dict[str, np.uint32]:
    if not batch:
        return {}
    sizes = [words.size for words in batch.values()]
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.uint32)
    words = np.concatenate(list(batch.values())) if len(batch) > 1 else next(iter(batch.values()))
    words = _mix(words, np.arange(words.size, dtype=np.uint32) - np.repeat(starts, sizes))
    return dict(zip(batch, np.add.reduceat(words, starts, dtype=np.uint32), strict=True))


def _sum_in_parts(words: np.ndarray) -> np.uint32:
    """Return the checksum of a large array of NumPy, without copies of the whole of it."""
    total = 0
    for start in range(0, words.size, SMALL):
        part = words[start : start + SMALL].astype(np.uint32)
        mixed = _mix(part, np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32))
        total += int(np.sum(mixed, dtype=np.uint32))
    return np.uint32(total % 2**32)


@jax.jit
def _sum_on_devices(leaf: Array) -> Array:
    """Return the checksum of an array on its devices. A sum of integers, unlike one of floats, does not depend on the
    sharding."""
    words = _words(leaf)
    # Positions of elements in the flat array; iotas are made in shards, where flattening would gather the whole.
    strides = np.cumprod([1, *words.shape[:0:-1]], dtype=np.uint64)[::-1].astype(np.uint32)
    steps = [lax.broadcasted_iota(jnp.uint32, words.shape, axis) * strides[axis] for axis in range(words.ndim)]
    words = _mix(words, sum(steps, jnp.uint32(0)))
    return jnp.sum(words, dtype=jnp.uint32)


def _words(leaf: Array) -> Array:
    """Return the array's bits, an element in one word or, if it has eight bytes, in two along a last axis."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == jnp.bool_:  # bitcast_convert_type takes no bool
        leaf = leaf.astype(jnp.uint8)
    info = jnp.iinfo if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo
    # A bitcast to a smaller type adds an axis.
    unsigned = jnp.dtype(f"uint{min(info(leaf.dtype).bits, 32)}")
    return lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix(words: Any, position: Any) -> Any:
    """Return words that depend on their position, for NumPy and JAX arrays: the last steps of MurmurHash3.

    At each position it is a bijection, so that another word gives another result. A mere product of word and position
    would miss that 1.0 and -1.0 have changed places: their words differ by 2**31.
    """
    words = words + position * np.uint32(0x9E3779B9)
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
