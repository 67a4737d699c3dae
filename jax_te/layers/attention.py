"""The core of attention: softmax of query-key products, times values."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax_te.config import check_positive, check_rate
from jax_te.ops import dot_product_attention
from jax_te.ops.attention_spec import MASK_TYPES, QKV
from jax_te.typing import Array, LogicalAxes

HEAD_AXES: LogicalAxes = ("batch", "sequence", "heads", None)
"""Logical axes of queries, keys, values and the attention's result, ``[b, s, n, d]``."""


def check_heads(num_attention_heads: int, num_gqa_groups: int | None) -> int:
    """Number of key/value heads ``g``; ValueError unless it divides the query heads."""
    groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
    check_positive(num_attention_heads=num_attention_heads, num_gqa_groups=groups)
    if num_attention_heads % groups:
        raise ValueError(f"num_attention_heads {num_attention_heads} is not divisible by num_gqa_groups {groups}")
    return groups


class DotProductAttention(nnx.Module):
    """``softmax(scale · q kᵀ + mask) v`` per head; no parameters.

    Args:
        num_attention_heads: query heads ``n``.
        kv_channels: head size ``d``.
        num_gqa_groups: key/value heads ``g``, a divisor of ``n``; query head ``i`` reads group ``i // (n / g)``.
            None: ``n``.
        attention_dropout: dropout probability of the softmax's result, in [0, 1).
        attn_mask_type: ``"causal"``, ``"no_mask"``, ``"padding"``, ``"padding_causal"`` or ``"arbitrary"``. The
            padding types take lengths at the call, ``"arbitrary"`` a mask.
        softmax_scale: None: ``1 / sqrt(d)``.

    Raises:
        ValueError: for sizes that do not divide or an unknown mask type; when called, for a mask or lengths that the
            mask type lacks or does not use, or heads of another number or size.

    Source: ``transformer_engine.pytorch.DotProductAttention``; Vaswani et al. 2017.

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((2, 8, 4, 16))
    >>> DotProductAttention(4, 16)(q, q, q).shape
    (2, 8, 4, 16)
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
    ):
        self.num_gqa_groups = check_heads(num_attention_heads, num_gqa_groups)
        check_positive(kv_channels=kv_channels)
        check_rate(attention_dropout=attention_dropout)
        if attn_mask_type not in MASK_TYPES:
            raise ValueError(f"unknown attn_mask_type {attn_mask_type!r}; allowed: {', '.join(MASK_TYPES)}")
        self.num_attention_heads = num_attention_heads
        self.kv_channels = kv_channels
        self.attention_dropout = attention_dropout
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale

    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Array | None = None,
        q_lengths: Array | None = None,
        kv_lengths: Array | None = None,
        dropout_key: Array | None = None,
        attn_mask_type: str | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Array:
        """Apply attention.

        Args:
            query: ``[b, sq, n, d]``; or all three packed, ``[b, s, 3, n, d]``, without ``key`` and ``value``.
            key, value: ``[b, skv, g, d]``.
            attention_mask: bool, broadcastable to ``[b, n, sq, skv]``, True is masked out; for ``"arbitrary"``.
            q_lengths, kv_lengths: int32 ``[b]``, valid tokens at the start of each sequence; for the padding types.
                ``q_lengths`` None: ``kv_lengths``.
            dropout_key: turns dropout on.
            attn_mask_type: in place of the layer's own.
            checkpoint_core_attention: recompute in backward what attention computed, in place of keeping it.

        Returns:
            ``[b, sq, n, d]`` in the dtype of ``query``.
        """
        mask_type: Any = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        self._check_operands(query, key, value)
        rate = 0.0 if dropout_key is None else self.attention_dropout

        def attend(
            qkv: QKV, mask: Array | None, q_lengths: Array | None, kv_lengths: Array | None, rng: Array | None
        ) -> Array:
            return dot_product_attention(
                qkv,
                mask_type=mask_type,
                mask=mask,
                q_lengths=q_lengths,
                kv_lengths=kv_lengths,
                scale=self.kv_channels**-0.5 if self.softmax_scale is None else self.softmax_scale,
                dropout_rate=rate,
                dropout_key=rng if rate > 0.0 else None,
                out_axes=HEAD_AXES,
            )

        with jax.named_scope("DotProductAttention"):
            qkv = (query,) if key is None or value is None else (query, key, value)
            run = jax.checkpoint(attend) if checkpoint_core_attention else attend
            return run(qkv, attention_mask, q_lengths, kv_lengths, dropout_key)

    def _check_operands(self, query: Array, key: Array | None, value: Array | None) -> None:
        n, g, d = self.num_attention_heads, self.num_gqa_groups, self.kv_channels
        shapes = [array.shape for array in (query, key, value) if array is not None]
        if len(shapes) == 1 and query.shape[2:] == (3, n, d) and g == n:
            return
        if [shape[2:] for shape in shapes] != [(n, d), (g, d), (g, d)]:
            packed = f", or one array [b, s, 3, {n}, {d}]" if g == n else ""
            raise ValueError(
                f"attention needs query [b, s, {n}, {d}], key and value [b, s, {g}, {d}]{packed}; got shapes {shapes}"
            )
