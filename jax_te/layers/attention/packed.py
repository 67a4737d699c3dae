"""Packed sequences, described as in Megatron."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_te._validation import check_annotations, check_positive, checked
from jax_te.ops import Segments, as_int32, segments_from_cu_seqlens
from jax_te.ops.attention import check_boundaries, segment_positions
from jax_te.typing import Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"],
    meta_fields=["qkv_format", "max_seqlen_q", "max_seqlen_kv", "total_tokens"],
)
@dataclass(frozen=True, kw_only=True)
class PackedSeqParams:
    """Boundaries of sequences that are concatenated into a row of tokens (``thd``).

    A token attends to tokens of its own sequence only. The number of sequences ``m`` follows from the arrays' size and
    is static: to describe fewer sequences, repeat the last entry.

    Args:
        qkv_format: ``"thd"``.
        cu_seqlens_q: cumulative lengths of the queries' sequences, beginning with 0: int32 ``[m + 1]`` for one row,
            ``[b, m + 1]`` for a batch of rows.
        cu_seqlens_kv: cumulative lengths of keys and values. None: those of the queries.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: offsets of the sequences, if there is padding between them. None:
            they follow one another without a gap.
        max_seqlen_q, max_seqlen_kv: length of the longest sequence, which CUDA kernels reserve memory for. Not read:
            the row's length is static and bounds it.
        total_tokens: length of the row, for `seq_idx`.

    Raises:
        ValueError: for another format; when used, for boundaries that do not begin with 0, decrease, overlap, or lie
            beyond the row, if they have values (not as arguments of a jitted function).

    Source: ``megatron.core.packed_seq_params.PackedSeqParams``.

    >>> import jax.numpy as jnp
    >>> packed = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, 5]))
    >>> packed.positions(6).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """

    qkv_format: str = "thd"
    # Any: jax.tree also fills these fields with shapes, shardings and placeholders, which are therefore not checked.
    cu_seqlens_q: Array | Any
    cu_seqlens_kv: Array | Any = None
    cu_seqlens_q_padded: Array | Any = None
    cu_seqlens_kv_padded: Array | Any = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        check_annotations(self, PackedSeqParams, ("max_seqlen_q", "max_seqlen_kv", "total_tokens"))
        if self.qkv_format != "thd":
            raise ValueError(
                f"PackedSeqParams describes qkv_format 'thd', got {self.qkv_format!r}; rows of one sequence each need "
                "none: give their lengths"
            )

    @property
    def segments(self) -> Segments:
        """Offsets and lengths of the sequences, as `jax_te.ops.dot_product_attention` takes them."""
        # Computed at each use instead of stored: derived arrays would become leaves of the pytree.
        return segments_from_cu_seqlens(
            self.cu_seqlens_q, self.cu_seqlens_kv, self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        )

    @property
    def seq_idx(self) -> Array | None:
        """Number of each token's sequence, from 0, int32 ``[b, total_tokens]``; None without ``total_tokens``.

        Padding between sequences has the preceding sequence's number, the rest of the row the last number plus one, as
        in Megatron's packed convolutions and scans.
        """
        if self.total_tokens is None:
            return None
        offsets = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        ends = jnp.atleast_2d(as_int32("cu_seqlens_q", offsets))[:, None, 1:]
        return jnp.sum(jnp.arange(self.total_tokens, dtype=jnp.int32)[None, :, None] >= ends, axis=-1, dtype=jnp.int32)

    @checked
    def check(self, q_size: int, kv_size: int | None = None) -> None:
        """Raise ValueError for boundaries that are not valid for a row; traced boundaries are not checked.

        Args:
            q_size: tokens of a row of queries.
            kv_size: tokens of a row of keys and values. None: ``q_size``.

        >>> PackedSeqParams(cu_seqlens_q=jnp.array([0, 6, 4])).check(8)
        Traceback (most recent call last):
        ValueError: cu_seqlens_q must begin with 0 and never decrease, got [0, 6, 4]
        """
        check_positive(q_size=q_size, **{} if kv_size is None else {"kv_size": kv_size})
        check_boundaries("q", self.cu_seqlens_q, self.cu_seqlens_q_padded, q_size)
        if self.cu_seqlens_kv is not None:
            padded = self.cu_seqlens_kv_padded
            check_boundaries("kv", self.cu_seqlens_kv, padded, q_size if kv_size is None else kv_size)

    @checked
    def positions(self, size: int) -> Array:
        """Return the position of each of a row's ``size`` tokens in its own sequence, int32 ``[b, size]``.

        Rotary embeddings take these positions. Padding has position 0.
        """
        check_positive(size=size)
        check_boundaries("q", self.cu_seqlens_q, self.cu_seqlens_q_padded, size)
        segments = self.segments
        return segment_positions(segments.q_offsets, segments.q_lengths, size).position

    @checked
    def segment_ids(self, size: int) -> Array:
        """Return the number of each token's sequence, from 1, int32 ``[b, size]``; padding has 0, to mask a loss."""
        check_positive(size=size)
        check_boundaries("q", self.cu_seqlens_q, self.cu_seqlens_q_padded, size)
        segments = self.segments
        return segment_positions(segments.q_offsets, segments.q_lengths, size).segment
