"""Packed sequences in Megatron's words."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax

from jax_te.ops import Segments, segments_from_cu_seqlens
from jax_te.ops.internal import places
from jax_te.typing import Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"],
    meta_fields=["qkv_format", "max_seqlen_q", "max_seqlen_kv"],
)
@dataclass(frozen=True, kw_only=True)
class PackedSeqParams:
    """Where the sequences lie that are packed one after another into a row of tokens (``thd``).

    Every sequence is attended to as if it were alone. The number of sequences ``m`` is the arrays' size, and so is
    static: repeat the last entry for sequences that are not there.

    Args:
        qkv_format: ``"thd"``.
        cu_seqlens_q: int32 ``[m + 1]`` for one row, ``[b, m + 1]`` for a batch of rows: 0, then the sum of the lengths
            so far.
        cu_seqlens_kv: of keys and values. None: as the queries'.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: where each sequence begins, if there is padding between them. None:
            they follow one another without a gap.
        max_seqlen_q, max_seqlen_kv: longest sequence; what CUDA kernels reserve. Here the row's length bounds it.

    Raises:
        ValueError: for another format.

    Source: ``megatron.core.packed_seq_params.PackedSeqParams``.

    >>> import jax.numpy as jnp
    >>> packed = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, 5]))
    >>> packed.positions(6).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Array
    cu_seqlens_kv: Array | None = None
    cu_seqlens_q_padded: Array | None = None
    cu_seqlens_kv_padded: Array | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    def __post_init__(self) -> None:
        if self.qkv_format != "thd":
            raise ValueError(
                f"PackedSeqParams describes qkv_format 'thd', got {self.qkv_format!r}; rows of one sequence each need "
                "none: give their lengths"
            )

    @property
    def segments(self) -> Segments:
        """For `jax_te.ops.dot_product_attention`."""
        return segments_from_cu_seqlens(
            self.cu_seqlens_q, self.cu_seqlens_kv, self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        )

    def positions(self, size: int) -> Array:
        """Position of each of a row's ``size`` tokens in its own sequence, int32 ``[b, size]``: for rotary embeddings.
        Padding has 0.
        """
        segments = self.segments
        return places(segments.q_offsets, segments.q_lengths, size).position

    def segment_ids(self, size: int) -> Array:
        """Number of the sequence of each token, from 1, int32 ``[b, size]``; padding has 0: for masking a loss."""
        segments = self.segments
        return places(segments.q_offsets, segments.q_lengths, size).segment
