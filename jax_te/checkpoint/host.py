"""Copies of a state in host memory, from which a checkpoint is written while the state changes."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jax_te.checkpoint.tree import is_key, key_data_or_self

PINNED = "pinned_host"
"""Memory kind of pinned host memory, to which devices write directly."""


class _Memory:
    """Bytes of existing copies, and their maximum so far: XLA keeps that memory allocated."""

    lock, held, most = threading.Lock(), 0, 0

    @classmethod
    def change(cls, size: int) -> bool:
        """Add ``size`` bytes (negative: freed), and return whether the total is a new maximum."""
        with cls.lock:
            cls.held += size
            more, cls.most = cls.held > cls.most, max(cls.most, cls.held)
            return more


def host_copies(leaves: list[Any]) -> list[Any]:
    """Return copies of the leaves that can be made by one call: in pinned memory, without a program to compile.

    Each has its leaf's sharding, in the other memory. Of replicas of one process there is one copy. None stands for an
    array that cannot be copied this way.

    Args:
        leaves: arrays. For a larger state than those before, this waits until all is copied.

    Raises:
        jax.errors.JaxRuntimeError: if there is too little memory to pin.

    >>> copies = host_copies([jnp.ones(2), np.zeros(2)])
    >>> copies[0].sharding.memory_kind, type(copies[1])
    ('pinned_host', <class 'numpy.ndarray'>)
    """
    # Work before the call delays the devices, so there is little.
    sources, places, numbers = list[jax.Array](), list[Sharding](), list[int]()
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            data = key_data_or_self(leaf)
            one = _one_replica(data, number)
            place = None if one is None else _pinned(one.sharding, one.dtype)
            if one is not None and place is not None:
                sources.append(one)
                places.append(place)
                numbers.append(number)
    size, most = sum(one.nbytes for one in sources), _Memory.most
    more = _Memory.change(size)
    made: Any = []
    try:
        # One call, because each costs as much as starting a program. A state that is in this memory is copied, too.
        made = jax.device_put(sources, places, may_alias=False)
        copies: list[Any] = [None if isinstance(leaf, jax.Array) else leaf.copy() for leaf in leaves]
        if more:
            # XLA may notice late that it has too little memory of this kind, and then the state would be gone.
            jax.block_until_ready(made)
    except BaseException as error:
        for copy in made:
            copy.delete()
        _Memory.change(-size)
        _Memory.most = 0 if isinstance(error, jax.errors.JaxRuntimeError) else most
        raise
    for number, copy in zip(numbers, made, strict=True):
        leaf = leaves[number]
        copies[number] = jax.random.wrap_key_data(copy, impl=jax.random.key_impl(leaf)) if is_key(leaf.dtype) else copy
    return copies


def free(copies: list[Any]) -> None:
    """Free the memory of copies, even if they are still referenced."""
    for copy in copies:
        if isinstance(copy, jax.Array) and not copy.is_deleted():
            data = key_data_or_self(copy)
            _Memory.change(-data.nbytes)
            data.delete()


def _one_replica(leaf: jax.Array, number: int) -> jax.Array | None:
    """Return an array of the same values with each part on one device only; None if that needs more than views.

    Args:
        leaf: array of any sharding.
        number: index of the leaf; replicas take turns, so that each device copies its share.
    """
    sharding = leaf.sharding
    if sharding.num_devices * math.prod(sharding.shard_shape(leaf.shape)) == leaf.size:
        return leaf
    if not isinstance(sharding, NamedSharding) or not leaf.is_fully_addressable:
        return None
    part = _one_of_replicas(sharding, number % sharding.num_devices)
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        leaf.shape, part, [parts[device] for device in part.device_set], dtype=leaf.dtype
    )


@lru_cache(maxsize=1024)
def _one_of_replicas(sharding: NamedSharding, number: int) -> NamedSharding:
    """Return the sharding over the same axes, with unnamed axes reduced to one device."""
    mesh: Any = sharding.mesh
    named = {axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    index = []
    for axis, size in mesh.shape.items():
        index.append(slice(None) if axis in named else slice(number % size, number % size + 1))
        number //= 1 if axis in named else size
    one = Mesh(mesh.devices[tuple(index)], mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(one, sharding.spec, memory_kind=sharding.memory_kind)


@lru_cache(maxsize=1024)
def _pinned(sharding: Sharding, dtype: np.dtype[Any]) -> Sharding | None:
    """Return the sharding in pinned memory; None if there is no such memory, or if NumPy could not read it there."""
    # The layout of two elements in one byte depends on the device.
    if jnp.issubdtype(dtype, jnp.number) and _bits(dtype) < 8:
        return None
    device = next(iter(sharding.addressable_devices))
    there = any(memory.kind == PINNED for memory in device.addressable_memories())
    return sharding.with_memory_kind(PINNED) if there else None


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 64
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
