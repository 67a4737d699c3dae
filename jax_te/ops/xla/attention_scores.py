"""Scores of queries and keys, and which of their probabilities dropout keeps: what plain attention is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.ops.xla.attention_mask import distance, hidden, kv_positions, q_positions
from jax_te.typing import Array


def by_group(x: Array, spec: AttentionSpec) -> Array:
    """``[b | 1, n | 1, …]`` as ``[b | 1, g | 1, r | 1, …]``."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], spec.groups, -1, *x.shape[2:])


def scores_of(q: Array, k: Array, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Logits fp32 ``[b, g, r, sq, skv]``, and which of them count as minus infinity."""
    grouped = q.reshape(*q.shape[:2], spec.groups, -1, spec.head_dim)
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32)
    bias = None if arrays.bias is None else arrays.bias.astype(jnp.float32)
    if spec.bias_type == "pre_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(by_group(bias, spec), scores.shape)
    scores = scores * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * jnp.tanh(scores / spec.logit_softcap)
    away = distance(spec, arrays) if spec.bias_type == "alibi" else None
    if spec.bias_type == "post_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(by_group(bias, spec), scores.shape)
    elif bias is not None and away is not None:
        slopes = jnp.atleast_2d(bias)[:, :, None, None]
        alibi = -slopes * jnp.abs(away).astype(jnp.float32)[:, None]
        scores = scores + jnp.broadcast_to(by_group(alibi, spec), scores.shape)
    out_of_sight = hidden(spec, arrays, away)
    if out_of_sight is not None:
        out_of_sight = jnp.broadcast_to(by_group(out_of_sight, spec), scores.shape)
    return scores, out_of_sight


def largest(scores: Array, out_of_sight: Array | None) -> Array:
    """Largest logit of each head that is seen, fp32 ``[n]``, without a gradient; minus infinity where nothing is."""
    seen = scores if out_of_sight is None else jnp.where(out_of_sight, -jnp.inf, scores)
    return jax.lax.stop_gradient(jnp.max(seen, axis=(0, 3, 4)).reshape(-1))


def drop(probs: Array, spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Probabilities ``[b, g, r, sq, skv]`` with a part of them dropped and the others scaled up; linear in them.

    What is dropped depends on the key, and on example, head and positions in the whole call: a device that has a part
    of them, in whatever order, drops what one device would.
    """
    if arrays.dropout_key is None or spec.dropout_rate == 0.0:
        return probs
    words = jax.random.bits(arrays.dropout_key, (2,), jnp.uint32)
    rows = arrays.rows
    if rows is None:
        rows = jnp.arange(spec.batch * spec.heads, dtype=jnp.int32).reshape(spec.batch, -1) * spec.q_length
    row = rows[:, :, None] + q_positions(spec, arrays)[None, None]
    row = jnp.broadcast_to(by_group(row, spec)[..., None], probs.shape).astype(jnp.uint32)
    column = jnp.broadcast_to(kv_positions(spec, arrays), probs.shape).astype(jnp.uint32)
    bits, _ = threefry2x32_p.bind(words[0], words[1], row, column)
    kept = 1.0 - spec.dropout_rate
    return jnp.where(bits < jnp.uint32(min(int(kept * 2**32), 2**32 - 1)), probs / kept, 0.0)
