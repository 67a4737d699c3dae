"""Which keys each query may see, and how far away they are."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_te.ops.attention.segments import Places, places_at
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.typing import Array


def q_positions(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Places of the queries in the whole sequence, int32 ``[sq]``."""
    return jnp.arange(spec.q_length, dtype=jnp.int32) if arrays.q_positions is None else arrays.q_positions


def kv_positions(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Places of the keys in the whole sequence, int32 ``[skv]``."""
    return jnp.arange(spec.kv_length, dtype=jnp.int32) if arrays.kv_positions is None else arrays.kv_positions


def distance(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Position of each key less its query's, int32 ``[b | 1, sq, skv]``: 0 on the diagonal, positive ahead.

    The diagonal starts at the first query and key, or ends at the last ones where the mask type is bottom-right. In a
    row of packed sequences every sequence counts from its own beginning.
    """
    if arrays.segments is not None:
        q, kv = _places(spec, arrays)
        q_position, kv_position = q.position, kv.position
        q_length, kv_length = q.length, _length_of_partner(arrays, q.segment)
    else:
        q_position, kv_position = q_positions(spec, arrays)[None], kv_positions(spec, arrays)[None]
        if arrays.q_lengths is not None and arrays.kv_lengths is not None:
            q_length, kv_length = arrays.q_lengths[:, None], arrays.kv_lengths[:, None]
        else:
            q_length, kv_length = (jnp.full((1, 1), size, jnp.int32) for size in (spec.q_length, spec.kv_length))
    if spec.is_bottom_right:
        q_position = q_position + (kv_length - q_length)
    return kv_position[:, None, :] - q_position[:, :, None]


def hidden(spec: AttentionSpec, arrays: AttentionArrays, away: Array | None = None) -> Array | None:
    """What each query may not see: bool ``[b | 1, 1 | n, sq, skv]``, or None where everything is seen.

    Args:
        spec, arrays: of the call.
        away: `distance`, if it is there already.
    """
    left, right = spec.window
    parts = []
    if left >= 0 or right >= 0:
        away = distance(spec, arrays) if away is None else away
        parts += [away < -left] if left >= 0 else []
        parts += [away > right] if right >= 0 else []
    if arrays.segments is not None:
        q, kv = _places(spec, arrays)
        parts.append((q.segment[:, :, None] != kv.segment[:, None, :]) | (q.segment == 0)[:, :, None])
    if arrays.q_lengths is not None and arrays.kv_lengths is not None:
        parts.append((q_positions(spec, arrays)[None, :] >= arrays.q_lengths[:, None])[:, :, None])
        parts.append((kv_positions(spec, arrays)[None, :] >= arrays.kv_lengths[:, None])[:, None, :])
    parts = [part[:, None] for part in parts]
    if arrays.mask is not None:
        parts.append(arrays.mask)
    if not parts:
        return None
    out = functools.reduce(lambda a, b: jnp.logical_or(*jnp.broadcast_arrays(a, b)), parts)
    return jnp.broadcast_to(out, (*out.shape[:2], spec.q_length, spec.kv_length))


def _places(spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Places, Places]:
    s = arrays.segments
    assert s is not None
    return (
        places_at(s.q_offsets, s.q_lengths, q_positions(spec, arrays)),
        places_at(s.kv_offsets, s.kv_lengths, kv_positions(spec, arrays)),
    )


def _length_of_partner(arrays: AttentionArrays, segment: Array) -> Array:
    """Length of the keys' sequence that each query belongs to, ``[b, sq]``."""
    assert arrays.segments is not None
    number = jnp.arange(1, arrays.segments.kv_lengths.shape[1] + 1, dtype=jnp.int32)[None, None, :]
    mine = segment[:, :, None] == number
    return jnp.sum(jnp.where(mine, arrays.segments.kv_lengths[:, None, :], jnp.zeros((), jnp.int32)), axis=-1)
