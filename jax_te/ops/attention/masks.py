"""Attention masks: sliding windows, causal diagonals, sequence lengths and packed sequences.

cuDNN builds these masks itself. The functions here serve plain JAX: a window and a causal mask are both bounds on
`distance`, how far a key is from its query along the mask type's diagonal.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_te._validation import is_integer
from jax_te.ops.attention.segments import SegmentPositions, segment_positions_at
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec, Window
from jax_te.typing import Array


def normal_window(window: Window | None, mask_type: str) -> Window:
    """Return ``(left, right)`` with -1 for all, and 0 to the right where the mask is causal.

    Raises:
        ValueError: for anything but two integers >= -1, or positions to the right under a causal mask.

    >>> normal_window((128, -1), "causal")
    (128, 0)
    """
    causal = "causal" in mask_type
    if window is None:
        return (-1, 0 if causal else -1)
    if (
        not isinstance(window, tuple | list)
        or len(window) != 2
        # bool is an int to isinstance, and (True, 0) would silently be a window of one position.
        or any(not is_integer(side) or side < -1 for side in window)
    ):
        raise ValueError(f"window_size must be (left, right), two integers >= -1 (-1: all), got {window!r}")
    left, right = window
    if causal and right > 0:
        raise ValueError(
            f"window_size {tuple(window)} shows {right} positions ahead, mask type {mask_type!r} none; take "
            f"({left}, 0), or a mask type that is not causal"
        )
    # From here on a causal mask is a window that ends at the query, so that backends need no separate rule.
    return (left, 0 if causal else right)


def q_positions(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return the positions of the queries in the whole sequence, int32 ``[sq]``."""
    return jnp.arange(spec.q_length, dtype=jnp.int32) if arrays.q_positions is None else arrays.q_positions


def kv_positions(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return the positions of the keys in the whole sequence, int32 ``[skv]``."""
    return jnp.arange(spec.kv_length, dtype=jnp.int32) if arrays.kv_positions is None else arrays.kv_positions


def distance(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return the position of each key less its query's, int32 ``[b | 1, sq, skv]``: 0 on the diagonal, positive ahead.

    The diagonal starts at the first query and key, or ends at the last ones where the mask type is bottom-right. Each
    packed sequence counts from its own beginning.
    """
    if arrays.segments is not None:
        q, kv = _segment_positions(spec, arrays)
        q_position, kv_position = q.position, kv.position
        q_length, kv_length = q.length, _key_length(arrays, q.segment)
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
    """Return the keys that are masked out for each query, bool ``[b | 1, 1 | n, sq, skv]``; None: no key is.

    Args:
        spec, arrays: spec and arrays of the call.
        away: `distance`, if it was computed already.
    """
    left, right = spec.window
    masks = []
    if left >= 0 or right >= 0:
        away = distance(spec, arrays) if away is None else away
        masks += [away < -left] if left >= 0 else []
        masks += [away > right] if right >= 0 else []
    if arrays.segments is not None:
        q, kv = _segment_positions(spec, arrays)
        # Padding is segment 0 on both sides: without the second term its queries would attend to padding.
        masks.append((q.segment[:, :, None] != kv.segment[:, None, :]) | (q.segment == 0)[:, :, None])
    if arrays.q_lengths is not None and arrays.kv_lengths is not None:
        masks.append((q_positions(spec, arrays)[None, :] >= arrays.q_lengths[:, None])[:, :, None])
        masks.append((kv_positions(spec, arrays)[None, :] >= arrays.kv_lengths[:, None])[:, None, :])
    masks = [mask[:, None] for mask in masks]
    if arrays.mask is not None:
        masks.append(arrays.mask)
    if not masks:
        return None
    # Broadcast by hand: numpy_rank_promotion="raise" would refuse to.
    out = functools.reduce(lambda a, b: jnp.logical_or(*jnp.broadcast_arrays(a, b)), masks)
    return jnp.broadcast_to(out, (*out.shape[:2], spec.q_length, spec.kv_length))


def _segment_positions(spec: AttentionSpec, arrays: AttentionArrays) -> tuple[SegmentPositions, SegmentPositions]:
    s = arrays.segments
    assert s is not None
    return (
        segment_positions_at(s.q_offsets, s.q_lengths, q_positions(spec, arrays)),
        segment_positions_at(s.kv_offsets, s.kv_lengths, kv_positions(spec, arrays)),
    )


def _key_length(arrays: AttentionArrays, segment: Array) -> Array:
    """Return the length of the keys' sequence that each query belongs to, ``[b, sq]``."""
    assert arrays.segments is not None
    # A masked sum, not a gather: XLA fuses it, and it needs no clamping for padding's segment 0.
    number = jnp.arange(1, arrays.segments.kv_lengths.shape[1] + 1, dtype=jnp.int32)[None, None, :]
    mine = segment[:, :, None] == number
    return jnp.sum(jnp.where(mine, arrays.segments.kv_lengths[:, None, :], jnp.zeros((), jnp.int32)), axis=-1)
