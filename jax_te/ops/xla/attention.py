"""Dot-product attention in plain JAX, and by cuDNN through ``jax.nn`` where it has the call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te._device import default_platform
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.xla.attention_scores import drop, max_logits, scores_of
from jax_te.typing import Array


def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Return True, since plain JAX runs every combination, and the name of the implementation."""
    kernel = "cuDNN through jax.nn" if _use_cudnn(spec) else "plain JAX"
    return True, kernel


# Through jax.nn cuDNN 9.19 has two faults with other lengths, both seen on an H200 with jax 0.11.2: where the number
# of keys is 64 more than a multiple of 128, dq is nan if all logits of a row are near -120 (as Qwen 2.5 has them); and
# with Transformer Engine loaded, calls of 704 and 1000 positions end in CUDA's cudaErrorInvalidValue, as do all after
# them.
_LENGTH_MULTIPLE = 128


def _use_cudnn(spec: AttentionSpec) -> bool:
    # Calls that cuDNN accepts through jax.nn, which raises for others if cuDNN is requested by name; minus its defects.
    return (
        default_platform() == "gpu"
        and spec.is_plain
        and spec.dtype in (jnp.bfloat16, jnp.float16)
        and spec.mask_type in ("no_mask", "causal")
        and spec.dropout_rate == 0.0
        and spec.head_dim % 8 == 0
        and spec.head_dim <= 128
        and spec.q_length % _LENGTH_MULTIPLE == 0
        and spec.kv_length % _LENGTH_MULTIPLE == 0
    )


def attention(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Return ``softmax(q k^T scale) v`` with the options of the spec, and the max logit of each head if requested.

    Scores and softmax are fp32; the output is ``[b, sq, n, dv]`` in the input's dtype. It is zero for a query that
    attends to no key.
    """
    q, k, v = unpack(qkv)
    if q.size == 0 or k.size == 0:
        # Not left to the softmax, which has no maximum here. Without keys the max logit is that of a masked row.
        max_logit = jnp.full(spec.heads, -jnp.inf) if spec.return_max_logit else None
        return jnp.zeros((*q.shape[:3], spec.v_head_dim), v.dtype), max_logit
    if _use_cudnn(spec):
        out = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=spec.is_causal, implementation="cudnn")
        return out, None
    scores, masked = scores_of(q, k, spec, arrays)
    max_logit = max_logits(scores, masked) if spec.return_max_logit else None
    probs = drop(_softmax(scores, masked, spec, arrays.softmax_offset), spec, arrays)
    out = jnp.einsum("bgrst,btgd->bsgrd", probs.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], spec.v_head_dim), max_logit


def _softmax(scores: Array, masked: Array | None, spec: AttentionSpec, offset: Array | None) -> Array:
    if masked is not None:
        # The lowest number, not -inf: the softmax over a row of -inf, and its gradient, would be nan.
        scores = jnp.where(masked, jnp.finfo(jnp.float32).min, scores)
    probs = jax.nn.softmax(scores, axis=-1)
    if spec.softmax_type != "vanilla":
        # exp(s) / (exp(a) + sum exp(s)) = softmax(s) · sigmoid(logsumexp(s) - a); off-by-one has a = 0.
        a = jnp.zeros((1, 1, 1, 1, 1), jnp.float32)
        if offset is not None:
            a = offset.astype(jnp.float32).reshape(1, spec.groups, -1, 1, 1)
        probs = probs * jax.nn.sigmoid(jax.nn.logsumexp(scores, axis=-1, keepdims=True) - a)
    # A fully masked row would have equal probabilities instead of zeros.
    return probs if masked is None else jnp.where(masked, 0.0, probs)
