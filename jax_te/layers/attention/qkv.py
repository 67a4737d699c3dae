"""Projections as operands of attention, and its result as the operand of the output projection."""

from __future__ import annotations

import functools
from math import prod

import jax.numpy as jnp

from jax_te.layers.attention.rotary import Rotary, apply_rotary
from jax_te.sharding import auto_region
from jax_te.typing import Array, LogicalAxes

HEAD_AXES: LogicalAxes = ("batch", "sequence", "heads", None)
"""Logical axes of queries, keys, values and the attention's result, ``[b, s, n, d]``."""


def pack_qkv(qkv: Array, groups: int, d: int) -> Array:
    """Return the fused projection ``[b, s, 3, g·d]`` as ``[b, s, 3, g, d]``, which cuDNN reads without a copy."""
    # The shape is bound, because a function in an auto_region takes only arrays as arguments.
    reshape = functools.partial(jnp.reshape, shape=(*qkv.shape[:3], groups, d))
    return auto_region(reshape, ("batch", "sequence", "components", "heads", None))(qkv)


def split_qkv(qkv: Array, groups: int, d: int) -> tuple[Array, Array, Array]:
    """Return queries ``[b, s, n, d]``, keys and values ``[b, s, g, d]`` of the fused projection ``[b, s, r + 2, g·d]``.

    Query head ``i`` is component ``i % r`` of group ``i // r``.
    """
    r = qkv.shape[2] - 2

    def split(qkv: Array) -> tuple[Array, ...]:
        qkv = qkv.reshape(*qkv.shape[:3], groups, d)
        return _interleave(qkv[:, :, :r]), qkv[:, :, r], qkv[:, :, r + 1]

    q, k, v = auto_region(split, (HEAD_AXES,) * 3)(qkv)
    return q, k, v


def split_query(q: Array, groups: int, d: int) -> Array:
    """Return queries ``[b, s, n, d]`` of a projection ``[b, s, r, g·d]``, with the heads in `split_qkv`'s order."""
    return auto_region(lambda q: _interleave(q.reshape(*q.shape[:3], groups, d)), HEAD_AXES)(q)


def split_key_value(kv: Array, groups: int, d: int) -> tuple[Array, Array]:
    """Return keys and values ``[b, s, g, d]`` of a projection ``[b, s, 2, g·d]``."""

    def split(kv: Array) -> tuple[Array, Array]:
        kv = kv.reshape(*kv.shape[:3], groups, d)
        return kv[:, :, 0], kv[:, :, 1]

    k, v = auto_region(split, (HEAD_AXES,) * 2)(kv)
    return k, v


def split_key(k: Array, groups: int, d: int) -> Array:
    """Return keys or values ``[b, s, g, d]`` of a projection ``[b, s, g·d]``."""
    return auto_region(functools.partial(jnp.reshape, shape=(*k.shape[:2], groups, d)), HEAD_AXES)(k)


def _interleave(q: Array) -> Array:
    """Return ``[b, s, r, g, d]`` as ``[b, s, g·r, d]``."""
    # Components are outermost in the kernel, but attention requires the heads of a group to be adjacent.
    return jnp.swapaxes(q, 2, 3).reshape(*q.shape[:2], q.shape[2] * q.shape[3], q.shape[4])


def rotate(x: Array, rotary: Rotary) -> Array:
    """Return heads ``[b, s, n, d]`` rotated by the angles of their positions."""
    return auto_region(apply_rotary, HEAD_AXES)(x, rotary)


def merge_heads(context: Array) -> Array:
    """Return ``[b, s, n, d]`` as ``[b, s, n·d]``, which the output projection reads."""
    reshape = functools.partial(jnp.reshape, shape=(*context.shape[:2], prod(context.shape[2:])))
    return auto_region(reshape, ("batch", "sequence", "heads"))(context)
