"""Dot-product attention in plain JAX, and cuDNN's through ``jax.nn`` where it applies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.attention_spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.xla.attention_mask import distance, hidden
from jax_te.typing import Array


def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Plain JAX runs every combination."""
    kernel = "cuDNN through jax.nn" if _use_cudnn(spec) else "plain JAX"
    return True, kernel


def _use_cudnn(spec: AttentionSpec) -> bool:
    return (
        jax.default_backend() == "gpu"
        and spec.is_plain
        and spec.dtype in (jnp.bfloat16, jnp.float16)
        and spec.mask_type in ("no_mask", "causal")
        and spec.dropout_rate == 0.0
        and spec.head_dim % 8 == 0
        and spec.head_dim <= 128
        and spec.q_length > 1
    )


def attention(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """``softmax(q k^T scale) v`` with all that the spec says, and the largest logit of each head if asked for.

    Scores and softmax are fp32; the output is ``[b, sq, n, dv]`` in the input's dtype. A query that sees nothing gives
    zeros.
    """
    q, k, v = unpack(qkv)
    if _use_cudnn(spec):
        out = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=spec.is_causal, implementation="cudnn")
        return out, None
    scores, out_of_sight = _scores(q, k, spec, arrays)
    max_logit = _max_logit(scores, out_of_sight) if spec.return_max_logit else None
    probs = _softmax(scores, out_of_sight, spec, arrays.softmax_offset)
    if arrays.dropout_key is not None and spec.dropout_rate > 0.0:
        keep = jax.random.bernoulli(arrays.dropout_key, 1.0 - spec.dropout_rate, probs.shape)
        probs = jnp.where(keep, probs / (1.0 - spec.dropout_rate), 0.0)
    out = jnp.einsum("bgrst,btgd->bsgrd", probs.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], spec.v_head_dim), max_logit


def _by_group(x: Array, spec: AttentionSpec) -> Array:
    """``[b | 1, n | 1, …]`` as ``[b | 1, g | 1, r | 1, …]``."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], spec.groups, -1, *x.shape[2:])


def _scores(q: Array, k: Array, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Logits fp32 ``[b, g, r, sq, skv]``, and which of them count as minus infinity."""
    grouped = q.reshape(*q.shape[:2], spec.groups, -1, spec.head_dim)
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32)
    bias = None if arrays.bias is None else arrays.bias.astype(jnp.float32)
    if spec.bias_type == "pre_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(_by_group(bias, spec), scores.shape)
    scores = scores * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * jnp.tanh(scores / spec.logit_softcap)
    away = distance(spec, arrays) if spec.bias_type == "alibi" else None
    if spec.bias_type == "post_scale_bias" and bias is not None:
        scores = scores + jnp.broadcast_to(_by_group(bias, spec), scores.shape)
    elif bias is not None and away is not None:
        slopes = jnp.atleast_2d(bias)[:, :, None, None]
        alibi = -slopes * jnp.abs(away).astype(jnp.float32)[:, None]
        scores = scores + jnp.broadcast_to(_by_group(alibi, spec), scores.shape)
    out_of_sight = hidden(spec, arrays, away)
    if out_of_sight is not None:
        out_of_sight = jnp.broadcast_to(_by_group(out_of_sight, spec), scores.shape)
    return scores, out_of_sight


def _max_logit(scores: Array, out_of_sight: Array | None) -> Array:
    """Largest logit that is seen, fp32 ``[n]``; minus infinity where nothing is."""
    seen = scores if out_of_sight is None else jnp.where(out_of_sight, -jnp.inf, scores)
    return jax.lax.stop_gradient(jnp.max(seen, axis=(0, 3, 4)).reshape(-1))


def _softmax(scores: Array, out_of_sight: Array | None, spec: AttentionSpec, offset: Array | None) -> Array:
    if out_of_sight is not None:
        scores = jnp.where(out_of_sight, jnp.finfo(jnp.float32).min, scores)
    probs = jax.nn.softmax(scores, axis=-1)
    if spec.softmax_type != "vanilla":
        # exp(s) / (exp(a) + sum exp(s)) = softmax(s) · sigmoid(logsumexp(s) - a); off-by-one has a = 0.
        a = jnp.zeros((1, 1, 1, 1, 1), jnp.float32)
        if offset is not None:
            a = offset.astype(jnp.float32).reshape(1, spec.groups, -1, 1, 1)
        probs = probs * jax.nn.sigmoid(jax.nn.logsumexp(scores, axis=-1, keepdims=True) - a)
    return probs if out_of_sight is None else jnp.where(out_of_sight, 0.0, probs)
