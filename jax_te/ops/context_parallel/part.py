"""One device's attention of some queries to some keys, by the backend of the call."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_te.ops.attention_spec import QKV, AttentionArrays, AttentionSpec
from jax_te.ops.backend import primitives
from jax_te.ops.context_parallel.call import MeshCall
from jax_te.typing import Array


class Result(NamedTuple):
    """What forward gives: output ``[b, sq, n, dv]``, logarithm of the softmax's denominator, fp32 ``[b, n, sq]``, and
    the largest logits, fp32 ``[n]``, or None.
    """

    out: Array
    log_sum: Array
    max_logit: Array | None


class Gradients(NamedTuple):
    """What backward gives: of queries, keys and values, of the bias, and of the softmax's offset."""

    qkv: QKV
    bias: Array | None
    offset: Array | None


def forward(call: MeshCall, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> Result:
    """The output of one part."""
    return Result(*primitives(call.backend).attention_forward(qkv, spec, arrays))


def backward(
    call: MeshCall, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
) -> Gradients:
    """Gradients of one part, from the output and the logarithms of all parts."""
    return Gradients(*primitives(call.backend).attention_backward(qkv, spec, arrays, out, log_sum, g))


def merge(whole: Result, part: Result) -> Result:
    """Attention to the keys of both, in fp32."""
    log_sum = jnp.logaddexp(whole.log_sum, part.log_sum)
    out = _weighted(whole, log_sum) + _weighted(part, log_sum)
    if whole.max_logit is None or part.max_logit is None:
        return Result(out, log_sum, None)
    return Result(out, log_sum, jnp.maximum(whole.max_logit, part.max_logit))


def _weighted(part: Result, log_sum: Array) -> Array:
    return part.out.astype(jnp.float32) * per_query(share(part.log_sum, log_sum))


def share(part: Array, whole: Array) -> Array:
    """``exp(part - whole)`` of logarithms, zero where the part sees nothing."""
    return jnp.where(part == -jnp.inf, 0.0, jnp.exp(part - whole))


def per_query(x: Array) -> Array:
    """``[b, n, s]`` as ``[b, s, n, 1]``."""
    return x.swapaxes(1, 2)[..., None]


def placed(
    call: MeshCall, arrays: AttentionArrays, q_positions: Array, kv_positions: Array
) -> tuple[AttentionSpec, AttentionArrays]:
    """For plain JAX: a part with queries and keys from some places of the whole sequence, in any order."""
    arrays = arrays._replace(q_positions=q_positions, kv_positions=kv_positions)
    mask_type = call.spec.mask_type
    if mask_type == "causal_bottom_right":  # along the diagonal of the whole, which is told by its lengths
        mask_type = "padding_causal_bottom_right"
        b = call.spec.batch // call.ranks(call.batch)
        arrays = arrays._replace(
            q_lengths=jnp.full((b,), call.spec.q_length, jnp.int32),
            kv_lengths=jnp.full((b,), call.spec.kv_length, jnp.int32),
        )
    return call.part(q_positions.shape[0], kv_positions.shape[0], mask_type), arrays
