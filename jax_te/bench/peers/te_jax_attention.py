"""Transformer Engine's own attention, unwrapped."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from transformer_engine.jax.flax import DotProductAttention

from jax_te.typing import Array

STRATEGIES = {"p2p": "ring", "all_gather": "all_gather"}
"""te.jax's names for the ways of context parallelism that it has."""


def raw_attention(head_dim: int, heads: int, groups: int, way: str | None) -> Callable[[Array, Array, Array], Array]:
    """Return ``attend(q [b, s, n, d], k [b, s, g, d], v) -> [b, s, n, d]``: te.jax's, causal, without dropout.

    ``way`` is one of `STRATEGIES`, over the mesh's context axis with zig-zag order, or None on one device. Call it, and
    everything that traces or compiles it, inside `raw_context`.
    """
    split = {} if way is None else {"context_parallel_axis": "context", "context_parallel_strategy": STRATEGIES[way]}
    module = DotProductAttention(
        head_dim=head_dim,
        num_attention_heads=heads,
        num_gqa_groups=groups,
        attn_mask_type="causal",
        qkv_layout="bshd_bshd_bshd",
        attention_dropout=0.0,
        transpose_batch_sequence=False,
        context_parallel_causal_load_balanced=way is not None,
        dtype=jnp.bfloat16,
        **split,
    )

    def attend(q: Array, k: Array, v: Array) -> Array:
        return module.apply({}, q, k, v, deterministic=True)

    return attend
