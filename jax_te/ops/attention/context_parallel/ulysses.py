"""Ulysses: an all-to-all that exchanges a sequence shard of all heads for a longer sequence of a shard of the heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses"; in groups of neighbours, Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.context_parallel.zigzag import chunk_order
from jax_te.ops.attention.spec import AttentionArrays
from jax_te.sharding import moved
from jax_te.typing import Array


def to_heads(sharding: AttentionSharding, x: Array) -> Array:
    """Return ``[b, s, n, d]`` as ``[b, s·a, n/a, d]``, on each of ``a`` devices that exchange.

    In zig-zag order the result is in the order that one device with as long a shard would have: the early chunks of all
    devices, then the late ones, by rising position.
    """
    # The exchange concatenates the shards of neighbours, in zig-zag order each an early chunk and a late one.
    x = _exchanged(sharding, x, 2, 1)
    return _reordered(x, _merged_order(sharding.ulysses_size)) if sharding.load_balanced else x


def to_sequence(sharding: AttentionSharding, x: Array) -> Array:
    """Return ``[b, s·a, n/a, d]`` as ``[b, s, n, d]``: the inverse of `to_heads`."""
    if sharding.load_balanced:
        x = _reordered(x, np.argsort(_merged_order(sharding.ulysses_size)))
    return _exchanged(sharding, x, 1, 2)


def _exchanged(sharding: AttentionSharding, x: Array, split: int, joined: int) -> Array:
    """Return ``x`` after an all-to-all that cuts one axis into parts and joins the parts received along another."""

    def exchange(x: Array) -> Array:
        groups = _groups(sharding)
        return jax.lax.all_to_all(x, sharding.context, split, joined, tiled=True, axis_index_groups=groups)

    return moved(x, exchange)


def arrays_of_heads(sharding: AttentionSharding, arrays: AttentionArrays) -> AttentionArrays:
    """Return the arrays of the heads that a device has after the exchange, with positions in natural order."""

    def own(x: Array | None, axis: int) -> Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        size = x.shape[axis] // sharding.ulysses_size
        return jax.lax.dynamic_slice_in_dim(x, _index(sharding) * size, size, axis)

    # Natural order, as a device now has all positions: masks and biases are given in the order of the tokens.
    alibi = sharding.spec.bias_type == "alibi" and arrays.bias is not None
    mask, bias = (x if x is None or x.ndim < 4 else _natural_order(sharding, x) for x in (arrays.mask, arrays.bias))
    return arrays._replace(
        mask=own(mask, 1),
        bias=own(bias, bias.ndim - 1 if alibi and bias is not None else 1),
        softmax_offset=own(arrays.softmax_offset, 0),
    )


def gradient_of_all_heads(sharding: AttentionSharding, gradient: Array | None, like: Array | None) -> Array | None:
    """Return the gradient of an array that `arrays_of_heads` sliced, zero for the heads of other devices."""
    if gradient is None or like is None:
        return None
    for axis, (size, total) in enumerate(zip(gradient.shape, like.shape, strict=True)):
        if size != total:
            # Zeros elsewhere: the subsequent sum over devices combines all heads.
            full = jnp.zeros((*gradient.shape[:axis], total, *gradient.shape[axis + 1 :]), gradient.dtype)
            gradient = jax.lax.dynamic_update_slice_in_dim(full, gradient, _index(sharding) * size, axis)
    return _natural_order(sharding, gradient, back=True) if gradient.ndim == 4 else gradient


def all_gather_heads(sharding: AttentionSharding, x: Array) -> Array:
    """Return ``[n/a]`` of each device as ``[n]``."""
    return jax.lax.all_gather(x, sharding.context, axis=0, tiled=True, axis_index_groups=_groups(sharding))


def _groups(sharding: AttentionSharding) -> list[list[int]] | None:
    """Return the context devices that exchange with each other; None: all do."""
    size, shards = sharding.ulysses_size, sharding.context_shards
    return None if size == shards else [list(range(start, start + size)) for start in range(0, shards, size)]


def _index(sharding: AttentionSharding) -> Array:
    # Neighbours exchange: the place in a group runs fastest along the context axis, the ring's slowest.
    return jax.lax.axis_index(sharding.context) % sharding.ulysses_size


def _merged_order(size: int) -> np.ndarray:
    """Return the order that sorts the chunks early, late, early, late … of ``size`` neighbours by position."""
    return np.concatenate([np.arange(0, 2 * size, 2), np.arange(2 * size - 1, 0, -2)])


def _reordered(x: Array, order: np.ndarray) -> Array:
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)


def _natural_order(sharding: AttentionSharding, x: Array, *, back: bool = False) -> Array:
    """Return ``[b, n, sq, skv]`` in zig-zag order brought into natural order, or ``back``."""
    if not sharding.load_balanced:
        return x
    order = np.argsort(chunk_order(sharding.context_shards))
    order = np.argsort(order) if back else order
    for axis in (2, 3):
        if x.shape[axis] > 1:
            x = jnp.moveaxis(_reordered(jnp.moveaxis(x, axis, 1), order), 1, axis)
    return x
