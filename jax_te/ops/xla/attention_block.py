"""Attention of some queries to some keys in plain JAX, with the log-sum-exp that merges such blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.attention.softmax_offset import offset_gradient, offset_of
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.xla.attention_scores import drop, max_logits, scores_of
from jax_te.typing import Array


def attention_forward(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array, Array | None]:
    """Return output ``[b, sq, n, dv]``, logarithm of the softmax's denominator, fp32 ``[b, n, sq]``, and max logits.

    The logarithm is minus infinity for a query that attends to no key.
    """
    q, k, v = unpack(qkv)
    scores, masked = scores_of(q, k, spec, arrays)
    max_logit = max_logits(scores, masked) if spec.return_max_logit else None
    if masked is not None:
        scores = jnp.where(masked, -jnp.inf, scores)
    log_sum = _log_sum(scores, spec, arrays)
    probs = drop(_probabilities(scores, log_sum, spec), spec, arrays)
    out = jnp.einsum("bgrst,btgd->bsgrd", probs.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], spec.v_head_dim), log_sum, max_logit


def attention_backward(
    qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
) -> tuple[QKV, Array | None, Array | None]:
    """Return the gradients of queries, keys and values (packed like them), of the bias, and of the softmax's offset.

    Args:
        qkv, spec, arrays: arguments of forward; the keys may be one block of those that the output attends to.
        out, log_sum: results of `attention_forward`, or of all blocks merged.
        g: gradient of the output.
    """
    q, k, v = unpack(qkv)
    # JAX differentiates scores, softcap and biases, but not the softmax, whose denominator covers all blocks.
    _, masked = scores_of(q, k, spec, arrays)
    scores, vjp = jax.vjp(lambda q, k, bias: scores_of(q, k, spec, arrays._replace(bias=bias))[0], q, k, arrays.bias)
    visible = scores if masked is None else jnp.where(masked, -jnp.inf, scores)
    probs = _probabilities(visible, log_sum, spec)
    grouped = g.reshape(*g.shape[:2], spec.groups, -1, spec.v_head_dim)
    # The probabilities are rounded to the operands' dtype for the GEMM only, as in forward.
    dv = jnp.einsum("bgrst,bsgrd->btgd", drop(probs, spec, arrays).astype(g.dtype), grouped)
    d_probs = jnp.einsum("bsgrd,btgd->bgrst", grouped, v, preferred_element_type=jnp.float32)
    mean = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)  # [b, s, n]: sum of probs · d_probs
    mean = mean.swapaxes(1, 2).reshape(*probs.shape[:4], 1)
    dq, dk, d_bias = vjp(probs * (drop(d_probs, spec, arrays) - mean))
    d_offset = None
    if arrays.softmax_offset is not None:
        d_offset = offset_gradient(arrays.softmax_offset, log_sum, out, g).astype(arrays.softmax_offset.dtype)
    gradients: QKV = (jnp.stack((dq, dk, dv), axis=2),) if len(qkv) == 1 else (dq, dk, dv)
    return gradients, d_bias, d_offset


def _log_sum(scores: Array, spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    top = jnp.max(scores, axis=-1, keepdims=True)
    # A query that attends to no key has -inf everywhere, and -inf - -inf is nan.
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    log_sum = (jnp.log(jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)) + top)[..., 0]
    log_sum = log_sum.reshape(log_sum.shape[0], -1, log_sum.shape[-1])
    offset = offset_of(spec, arrays)
    return log_sum if offset is None else jnp.logaddexp(log_sum, jnp.broadcast_to(offset, log_sum.shape))


def _probabilities(scores: Array, log_sum: Array, spec: AttentionSpec) -> Array:
    """Return probabilities from scores that are minus infinity where masked out."""
    total = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
    return jnp.exp(scores - total.reshape(*scores.shape[:4], 1))
