"""Packed sequences: several sequences one after another in each row of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_te._validation import brief, checked
from jax_te.ops.integers import as_int32, is_known
from jax_te.typing import Array


class Segments(NamedTuple):
    """Starts and lengths of the packed sequences in every row of a batch.

    Args:
        q_offsets, kv_offsets: int32 ``[b, m]``, first position of each of at most ``m`` sequences, in rising order.
        q_lengths, kv_lengths: int32 ``[b, m]``, valid positions of each. Positions between the end of a sequence and
            the beginning of the next one are padding. Sequences of length 0 are last.

    Source: ``transformer_engine.jax.attention.SequenceDescriptor``; ``thd`` in ``transformer_engine.pytorch``.
    """

    q_offsets: Array
    q_lengths: Array
    kv_offsets: Array
    kv_lengths: Array


class SegmentPositions(NamedTuple):
    """The packed sequence of every position of a row, and the position within that sequence: ``[b, s]`` each.

    Args:
        segment: int32, number of the sequence from 1; 0 is padding.
        position: int32, from 0 in each sequence.
        length: int32, length of the sequence.
    """

    segment: Array
    position: Array
    length: Array


@checked
def segments_from_cu_seqlens(
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array | None = None,
    cu_seqlens_q_padded: Array | None = None,
    cu_seqlens_kv_padded: Array | None = None,
) -> Segments:
    """Return `Segments` from cumulative lengths, Megatron's and FlashAttention's form.

    Args:
        cu_seqlens_q: int32 ``[m + 1]`` or ``[b, m + 1]``: 0, then the sum of the lengths so far. Unused entries at the
            end repeat the last one.
        cu_seqlens_kv: boundaries of keys and values, likewise. None: those of the queries.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: start of each sequence in memory, if there is padding between
            sequences. None: no padding. Where both arrays for keys are None, those of the queries are taken.

    Raises:
        TypeError: for arrays that are not integers.
        ValueError: for shapes that do not agree.

    >>> segments_from_cu_seqlens(jnp.array([0, 3, 5])).q_lengths.tolist()
    [[3, 2]]
    """
    check_boundaries("q", cu_seqlens_q, cu_seqlens_q_padded)
    if cu_seqlens_kv is not None:
        check_boundaries("kv", cu_seqlens_kv, cu_seqlens_kv_padded)
    q_offsets, q_lengths = _offsets_and_lengths("q", cu_seqlens_q, cu_seqlens_q_padded)
    if cu_seqlens_kv is None:
        if cu_seqlens_kv_padded is None:
            # The same arrays, not copies: equality of lengths is then known while tracing, and an all-gather can align
            # queries and keys at the end of each sequence.
            return Segments(q_offsets, q_lengths, q_offsets, q_lengths)
        cu_seqlens_kv = cu_seqlens_q
    kv_offsets, kv_lengths = _offsets_and_lengths("kv", cu_seqlens_kv, cu_seqlens_kv_padded)
    if q_offsets.shape != kv_offsets.shape:
        raise ValueError(
            f"cu_seqlens_q {cu_seqlens_q.shape} and cu_seqlens_kv {cu_seqlens_kv.shape} must hold as many sequences"
        )
    return Segments(q_offsets, q_lengths, kv_offsets, kv_lengths)


def _offsets_and_lengths(name: str, cu_seqlens: Array, padded: Array | None) -> tuple[Array, Array]:
    given: dict[str, Any] = {"": cu_seqlens} | ({} if padded is None else {"_padded": padded})
    for suffix, array in given.items():
        if not jnp.issubdtype(getattr(array, "dtype", object), jnp.integer):
            raise TypeError(
                f"cu_seqlens_{name}{suffix} must be an array of integers, got {getattr(array, 'dtype', brief(array))}"
            )
        if array.ndim not in (1, 2) or array.shape[-1] < 2 or array.shape != cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens_{name}{suffix} must be [m + 1] or [b, m + 1], padded or not alike; got {array.shape}"
                + ("" if array is cu_seqlens else f" beside {cu_seqlens.shape}")
            )
    cu_seqlens = jnp.atleast_2d(as_int32(f"cu_seqlens_{name}", cu_seqlens))
    starts = cu_seqlens if padded is None else jnp.atleast_2d(as_int32(f"cu_seqlens_{name}_padded", padded))
    return starts[:, :-1], cu_seqlens[:, 1:] - cu_seqlens[:, :-1]


def segment_positions(offsets: Array, lengths: Array, size: int) -> SegmentPositions:
    """Return the `SegmentPositions` of the ``size`` positions of each row, from offsets and lengths ``[b, m]``.

    >>> segment_positions(jnp.array([[0, 4]]), jnp.array([[3, 2]]), 8).segment.tolist()
    [[1, 1, 1, 0, 2, 2, 0, 0]]
    """
    return segment_positions_at(offsets, lengths, jnp.arange(size, dtype=jnp.int32))


def segment_positions_at(offsets: Array, lengths: Array, positions: Array) -> SegmentPositions:
    """Return the `SegmentPositions` of some positions, int32 ``[s]`` in any order: those of a device's shard.

    >>> segment_positions_at(jnp.array([[0, 4]]), jnp.array([[3, 2]]), jnp.array([5, 0])).segment.tolist()
    [[2, 1]]
    """
    index = positions[None, :, None]
    inside = (index >= offsets[:, None, :]) & (index < (offsets + lengths)[:, None, :])  # [b, s, m]

    # Masked sums, not a gather: XLA fuses them, and padding, which is in no sequence, gets zeros.
    def pick(values: Array) -> Array:
        return jnp.sum(jnp.where(inside, values, jnp.zeros((), jnp.int32)), axis=-1, dtype=jnp.int32)

    number = jnp.arange(1, offsets.shape[-1] + 1, dtype=jnp.int32)[None, None, :]
    return SegmentPositions(pick(number), pick(index - offsets[:, None, :]), pick(lengths[:, None, :]))


def check_boundaries(which: str, lengths: Array, padded: Array | None, size: int | None = None) -> None:
    """Raise ValueError for concrete cumulative lengths and offsets that are not valid for rows.

    Args:
        which: ``"q"`` or ``"kv"``, for messages.
        lengths: the argument ``cu_seqlens``.
        padded: the argument ``cu_seqlens_padded``.
        size: tokens of a row. None: it is not known.
    """
    found = {f"cu_seqlens_{which}": _values(lengths), f"cu_seqlens_{which}_padded": _values(padded)}
    known = {name: rows for name, rows in found.items() if rows is not None}
    for name, rows in known.items():
        for row in rows:
            if row[0] != 0 or (np.diff(row) < 0).any():
                raise ValueError(f"{name} must begin with 0 and never decrease, got {row.tolist()}")
            if size is not None and row[-1] > size:
                raise ValueError(f"{name} ends at {row[-1]}, beyond a row of {size} tokens: {row.tolist()}")
    if len(known) < 2:
        return
    (name, own), (other, offsets) = known.items()
    if own.shape == offsets.shape and (np.diff(own) > np.diff(offsets)).any():
        raise ValueError(f"sequences of {name} {own.tolist()} are longer than what {other} has: {offsets.tolist()}")


def _values(boundaries: Any) -> np.ndarray | None:
    """Return boundaries as rows; None if their values are unknown here: in ``jit``, or on other processes' devices."""
    if not is_known(boundaries):
        return None
    if not np.issubdtype(boundaries.dtype, np.integer) or boundaries.ndim not in (1, 2) or not boundaries.size:
        return None
    # In 64 bits: differences of unsigned or narrow numbers would wrap around.
    return np.atleast_2d(np.asarray(boundaries).astype(np.int64))
