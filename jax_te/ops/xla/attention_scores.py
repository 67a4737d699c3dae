"""Attention scores and dropout of their probabilities, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from jax_te.ops.attention.masks import distance, hidden, kv_positions, q_positions
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.quantize import max_or_nan
from jax_te.random import key_for
from jax_te.typing import Array


def by_group(x: Array, spec: AttentionSpec) -> Array:
    """Return ``[b | 1, n | 1, …]`` as ``[b | 1, g | 1, r | 1, …]``."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], spec.groups, -1, *x.shape[2:])


def scores_of(q: Array, k: Array, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Return logits, fp32 ``[b, g, r, sq, skv]``, and a mask of those that count as minus infinity, or None."""
    # Query heads are grouped instead of repeating the keys for each of r heads.
    grouped = q.reshape(*q.shape[:2], spec.groups, -1, spec.head_dim)
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32)
    bias = None if arrays.bias is None else arrays.bias.astype(jnp.float32)
    if spec.bias_type == "pre_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(by_group(bias, spec), scores.shape)
    scores = scores * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * jnp.tanh(scores / spec.logit_softcap)
    # ALiBi and windows both need the distance, which is computed once for the two.
    away = distance(spec, arrays) if spec.bias_type == "alibi" else None
    if spec.bias_type == "post_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(by_group(bias, spec), scores.shape)
    elif bias is not None and away is not None:
        slopes = jnp.atleast_2d(bias)[:, :, None, None]
        alibi = -slopes * jnp.abs(away).astype(jnp.float32)[:, None]
        scores = scores + jnp.broadcast_to(by_group(alibi, spec), scores.shape)
    masked = hidden(spec, arrays, away)
    if masked is not None:
        masked = jnp.broadcast_to(by_group(masked, spec), scores.shape)
    return scores, masked


def max_logits(scores: Array, masked: Array | None) -> Array:
    """Return the max logit of each head, fp32 ``[n]``, without a gradient.

    It is minus infinity if all are masked out, and nan if one of those that are not is.
    """
    visible = scores if masked is None else jnp.where(masked, -jnp.inf, scores)
    return jax.lax.stop_gradient(max_or_nan(visible, axis=(0, 3, 4)).reshape(-1))


def drop(probs: Array, spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return probabilities ``[b, g, r, sq, skv]`` with some dropped and the others scaled up; linear in them.

    The dropped ones depend on the key, and on example, head and positions in the whole call: a device with a shard of
    them, in any order, drops the same ones as a single device would.
    """
    if arrays.dropout_key is None or spec.dropout_rate == 0.0:
        return probs
    words = jax.random.bits(key_for("attention_probabilities", arrays.dropout_key), (2,), jnp.uint32)
    rows = arrays.rows
    if rows is None:
        rows = jnp.arange(spec.batch * spec.heads, dtype=jnp.int32).reshape(spec.batch, -1) * spec.q_length
    row = rows[:, :, None] + q_positions(spec, arrays)[None, None]
    row = jnp.broadcast_to(by_group(row, spec)[..., None], probs.shape).astype(jnp.uint32)
    column = jnp.broadcast_to(kv_positions(spec, arrays), probs.shape).astype(jnp.uint32)
    # The hash itself, not jax.random.bits: that counts along the array's own axes, of which a device has a shard.
    bits, _ = threefry2x32_p.bind(words[0], words[1], row, column)
    kept = 1.0 - spec.dropout_rate
    # 2^32, where a rate near 0 rounds to, does not fit in uint32.
    return jnp.where(bits < jnp.uint32(min(int(kept * 2**32), 2**32 - 1)), probs / kept, 0.0)
