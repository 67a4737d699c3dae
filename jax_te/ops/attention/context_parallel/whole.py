"""Every device has all positions of its heads: after an exchange, or without context parallelism."""

from __future__ import annotations

from jax_te.ops.attention.context_parallel import part
from jax_te.ops.attention.context_parallel.call import MeshCall
from jax_te.ops.attention.spec import QKV, AttentionArrays
from jax_te.typing import Array


def forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> part.Result:
    """Attention of a device's heads."""
    return part.forward(call, qkv, call.part(call.spec.q_length, call.spec.kv_length), arrays)


def backward(call: MeshCall, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array) -> part.Gradients:
    """Its gradients."""
    spec = call.part(call.spec.q_length, call.spec.kv_length)
    return part.backward(call, qkv, spec, arrays, out, log_sum, g)
