"""All-to-all between the sequence and the heads: a part of the sequence for all heads, or more of it for some.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses"; in groups of neighbours, Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops.attention.context_parallel.call import MeshCall
from jax_te.ops.attention.context_parallel.order import chunk_order
from jax_te.ops.attention.spec import AttentionArrays
from jax_te.typing import Array


def groups(call: MeshCall) -> list[list[int]] | None:
    """Context ranks that exchange; None: all."""
    size, ranks = call.exchange_ranks, call.context_ranks
    return None if size == ranks else [list(range(start, start + size)) for start in range(0, ranks, size)]


def to_heads(call: MeshCall, x: Array) -> Array:
    """``[b, s, n, d]`` as ``[b, s·a, n/a, d]`` on each of ``a`` ranks that exchange.

    In zig-zag order the result is in the order that a rank of its own would have with as many keys: the early chunks of
    all ranks, then the late ones, by rising position.
    """
    x = jax.lax.all_to_all(x, call.context_name, 2, 1, tiled=True, axis_index_groups=groups(call))
    return _chunks(x, _merged_order(call.exchange_ranks)) if call.load_balanced else x


def to_sequence(call: MeshCall, x: Array) -> Array:
    """The opposite of `to_heads`."""
    if call.load_balanced:
        x = _chunks(x, np.argsort(_merged_order(call.exchange_ranks)))
    return jax.lax.all_to_all(x, call.context_name, 1, 2, tiled=True, axis_index_groups=groups(call))


def _merged_order(ranks: int) -> np.ndarray:
    """Which of the chunks early, late, early, late … of some neighbours come one after another."""
    return np.concatenate([np.arange(0, 2 * ranks, 2), np.arange(2 * ranks - 1, 0, -2)])


def _chunks(x: Array, order: np.ndarray) -> Array:
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)


def heads_of(call: MeshCall, arrays: AttentionArrays) -> AttentionArrays:
    """The arrays of the heads that a rank has after the exchange, positions in natural order."""

    def mine(x: Array | None, axis: int) -> Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        size = x.shape[axis] // call.exchange_ranks
        return jax.lax.dynamic_slice_in_dim(x, _place(call) * size, size, axis)

    alibi = call.spec.bias_type == "alibi" and arrays.bias is not None
    mask, bias = (x if x is None or x.ndim < 4 else _sorted(call, x) for x in (arrays.mask, arrays.bias))
    return arrays._replace(
        mask=mine(mask, 1),
        bias=mine(bias, bias.ndim - 1 if alibi and bias is not None else 1),
        softmax_offset=mine(arrays.softmax_offset, 0),
    )


def whole_gradient(call: MeshCall, gradient: Array | None, like: Array | None) -> Array | None:
    """The gradient of what `heads_of` took a part of, zero where other ranks have theirs."""
    if gradient is None or like is None:
        return None
    for axis, (size, whole) in enumerate(zip(gradient.shape, like.shape, strict=True)):
        if size != whole:
            full = jnp.zeros((*gradient.shape[:axis], whole, *gradient.shape[axis + 1 :]), gradient.dtype)
            gradient = jax.lax.dynamic_update_slice_in_dim(full, gradient, _place(call) * size, axis)
    return _sorted(call, gradient, back=True) if gradient.ndim == 4 else gradient


def gather_heads(call: MeshCall, x: Array) -> Array:
    """``[n/a]`` of each rank as ``[n]``."""
    return jax.lax.all_gather(x, call.context_name, axis=0, tiled=True, axis_index_groups=groups(call))


def _place(call: MeshCall) -> Array:
    return jax.lax.axis_index(call.context_name) % call.exchange_ranks


def _sorted(call: MeshCall, x: Array, *, back: bool = False) -> Array:
    """``[b, n, sq, skv]`` in zig-zag order, brought into natural order, or back."""
    if not call.load_balanced:
        return x
    order = np.argsort(chunk_order(call.context_ranks))
    order = np.argsort(order) if back else order
    for axis in (2, 3):
        if x.shape[axis] > 1:
            x = jnp.moveaxis(_chunks(jnp.moveaxis(x, axis, 1), order), 1, axis)
    return x
