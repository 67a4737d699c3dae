"""Dot-product attention in plain JAX, and cuDNN's through ``jax.nn`` where it applies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.attention_spec import QKV, AttentionSpec, unpack
from jax_te.typing import Array


def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Plain JAX runs every combination."""
    kernel = "cuDNN through jax.nn" if _use_cudnn(spec) else "plain JAX"
    return True, kernel


def _use_cudnn(spec: AttentionSpec) -> bool:
    return (
        jax.default_backend() == "gpu"
        and spec.dtype in (jnp.bfloat16, jnp.float16)
        and spec.mask_type in ("no_mask", "causal")
        and spec.dropout_rate == 0.0
        and spec.head_dim % 8 == 0
        and spec.head_dim <= 128
        and spec.q_length > 1
    )


def masked_out(
    spec: AttentionSpec, mask: Array | None, q_lengths: Array | None, kv_lengths: Array | None
) -> Array | None:
    """What each query may not see: bool ``[b | 1, 1 | n, sq, skv]``, or None for everything visible."""
    hidden = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], spec.q_length, spec.kv_length))
    q_index = jnp.arange(spec.q_length)[None, None, :, None]
    kv_index = jnp.arange(spec.kv_length)[None, None, None, :]
    parts = [] if hidden is None else [hidden]
    if spec.is_causal:
        parts.append(kv_index > q_index)
    if q_lengths is not None:
        parts.append(q_index >= q_lengths[:, None, None, None])
    if kv_lengths is not None:
        parts.append(kv_index >= kv_lengths[:, None, None, None])
    if not parts:
        return None
    out = parts[0]
    for part in parts[1:]:
        out = jnp.logical_or(*jnp.broadcast_arrays(out, part))
    return out


def attention(
    qkv: QKV,
    spec: AttentionSpec,
    *,
    mask: Array | None,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    dropout_key: Array | None,
) -> Array:
    """``softmax(q k^T scale) v``: scores and softmax in fp32, output ``[b, sq, n, d]`` in the input's dtype.

    A query that sees nothing gives zeros.
    """
    q, k, v = unpack(qkv)
    if _use_cudnn(spec):
        return jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=spec.is_causal, implementation="cudnn")
    grouped = q.reshape(*q.shape[:2], spec.groups, -1, spec.head_dim)
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32) * spec.scale
    hidden = masked_out(spec, mask, q_lengths, kv_lengths)
    if hidden is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        if hidden.shape[1] == 1:
            hidden = hidden[:, :, None]
        else:
            hidden = hidden.reshape(hidden.shape[0], spec.groups, -1, *hidden.shape[2:])
        hidden = jnp.broadcast_to(hidden, scores.shape)
        probs = jax.nn.softmax(jnp.where(hidden, jnp.finfo(jnp.float32).min, scores), axis=-1)
        probs = jnp.where(hidden, 0.0, probs)
    if dropout_key is not None and spec.dropout_rate > 0.0:
        keep = jax.random.bernoulli(dropout_key, 1.0 - spec.dropout_rate, probs.shape)
        probs = jnp.where(keep, probs / (1.0 - spec.dropout_rate), 0.0)
    out = jnp.einsum("bgrst,btgd->bsgrd", probs.astype(v.dtype), v)
    return out.reshape(q.shape)
