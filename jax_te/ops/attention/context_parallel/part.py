"""One device's attention of some queries to some keys, by the backend of the call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.attention.context_parallel.call import MeshCall
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec
from jax_te.ops.backend import primitives
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


def merge(parts: list[Result]) -> Result:
    """Attention to the keys of all, in fp32."""
    log_sum = parts[0].log_sum
    for more in parts[1:]:
        log_sum = jnp.logaddexp(log_sum, more.log_sum)
    out = _weighted(parts[0], log_sum)
    for more in parts[1:]:
        out = out + _weighted(more, log_sum)
    logits = [part.max_logit for part in parts if part.max_logit is not None]
    return Result(out, log_sum, functools.reduce(jnp.maximum, logits) if logits else None)


def total(parts: list[Array]) -> Array:
    """The sum, in fp32."""
    whole = parts[0].astype(jnp.float32)
    for more in parts[1:]:
        whole = whole + more.astype(jnp.float32)
    return whole


def _weighted(part: Result, log_sum: Array) -> Array:
    return part.out.astype(jnp.float32) * per_query(share(part.log_sum, log_sum))


def share(part: Array, whole: Array) -> Array:
    """``exp(part - whole)`` of logarithms, zero where the part sees nothing."""
    return jnp.where(part == -jnp.inf, 0.0, jnp.exp(part - whole))


def per_query(x: Array) -> Array:
    """``[b, n, s]`` as ``[b, s, n, 1]``."""
    return x.swapaxes(1, 2)[..., None]


def put(x: Array, taken: slice, axis: int, size: int, fill: float = 0.0) -> Array:
    """``x`` as some of ``size`` places along an axis.

    Not by ``.at[...].set``: its empty array of indices, an input that nothing reads, makes the compiler for GPUs crash
    inside of shard_map (Shardy of jax 0.11.2: unused inputs of manual computations).
    """
    if x.shape[axis] == size:
        return x
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (taken.start, size - taken.stop, 0)
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), edges)


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
