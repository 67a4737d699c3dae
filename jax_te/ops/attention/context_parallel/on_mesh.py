"""Attention on each device of a mesh, forward and backward.

The derivative rules contain explicit collectives, so that JAX need not differentiate them, and kernels that the
compiler cannot partition receive one device's arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_te.ops.attention.context_parallel import all_gather, block, ring, ulysses
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import QKV, AttentionArrays, unpack
from jax_te.ops.first_order import why_backend
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.sharding import MeshAxes, entry_axes, reduce_max, reduce_sum
from jax_te.typing import Array


class _Operands(NamedTuple):
    qkv: Any
    arrays: AttentionArrays


class _Residuals(NamedTuple):
    """Residuals of attention: ``qkv``, ``out`` and ``log_sum``, after an exchange for heads."""

    qkv: Any
    arrays: AttentionArrays
    out: Array
    log_sum: Array


def attention_on_mesh(sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Return the output ``[b, sq, n, dv]`` and max logits ``[n]`` or None, of arrays that are sharded over the mesh."""
    operands = _Operands(qkv, arrays)
    return _attention(sharding, _shards(sharding, operands), operands)


def _forward(sharding: AttentionSharding, operands: _Operands) -> tuple[tuple[Array, Array | None], _Residuals]:
    qkv, arrays = operands
    if sharding.ulysses_size > 1:
        qkv = tuple([ulysses.to_heads(sharding, x) for x in unpack(qkv)])
    result = _strategy(sharding)[0](sharding, qkv, _local_arrays(sharding, arrays))
    out, log_sum, max_logit = result.out, result.log_sum, result.max_logit
    # As on one device: a remat policy that saves this name does not run attention again.
    out, log_sum = checkpoint_name(out, "context"), checkpoint_name(log_sum, "context")
    # After an exchange for heads its results are kept, so that backward does not exchange again.
    residuals = _Residuals(qkv, arrays, out, log_sum)
    if sharding.ulysses_size > 1:
        out = checkpoint_name(ulysses.to_sequence(sharding, out), "context")
        max_logit = None if max_logit is None else ulysses.all_gather_heads(sharding, max_logit)
    if max_logit is not None:
        max_logit = reduce_max(max_logit, sharding.batch + sharding.context)
    return (out, max_logit), residuals


def _backward(sharding: AttentionSharding, residuals: _Residuals, g: tuple[Array, None]) -> tuple[_Operands, None]:
    qkv, arrays, out, log_sum = residuals
    dout, _ = g
    if sharding.gathers or sharding.ring_size > 1:
        # Without the barrier the compiler finds that forward gathered or moved the same keys, and keeps all devices'
        # keys in memory until backward.
        qkv, log_sum, dout = jax.lax.optimization_barrier((qkv, log_sum, dout))
    if sharding.ulysses_size > 1:
        dout = ulysses.to_heads(sharding, dout)
    local = _local_arrays(sharding, arrays)
    d_qkv, d_bias, d_offset, _ = _strategy(sharding)[1](sharding, qkv, local, out, log_sum, dout)
    if sharding.ulysses_size > 1:
        d_qkv = tuple([ulysses.to_sequence(sharding, x) for x in unpack(d_qkv)])
        d_bias = ulysses.gradient_of_all_heads(sharding, d_bias, arrays.bias)
        d_offset = ulysses.gradient_of_all_heads(sharding, d_offset, arrays.softmax_offset)
    if sharding.spec.packed and len(d_qkv) == 3:
        d_qkv = (jnp.stack(d_qkv, axis=2),)
    d_bias = _sum_of_replicas(sharding, d_bias, _bias_spec(sharding))
    d_offset = _sum_of_replicas(sharding, d_offset, PartitionSpec(sharding.heads))
    return _Operands(d_qkv, AttentionArrays(bias=d_bias, softmax_offset=d_offset)), None


_attention = sharded_vjp(_forward, _backward, once=lambda sharding: why_backend(sharding.backend))


def _strategy(sharding: AttentionSharding) -> tuple[Any, Any]:
    """Return the forward and backward rules of a kind of key/value exchange."""
    if sharding.gathers:
        return all_gather.forward, all_gather.backward
    return (ring.forward, ring.backward) if sharding.ring_size > 1 else (_own_forward, _own_backward)


def _own_forward(sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays) -> block.BlockOutput:
    """Return the attention of a device that holds all positions of its heads."""
    return block.forward(sharding, qkv, sharding.shard_spec(sharding.spec.q_length, sharding.spec.kv_length), arrays)


def _own_backward(sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays, *rest: Array) -> block.BlockGradients:
    spec = sharding.shard_spec(sharding.spec.q_length, sharding.spec.kv_length)
    return block.backward(sharding, qkv, spec, arrays, *rest)


def _local_arrays(sharding: AttentionSharding, arrays: AttentionArrays) -> AttentionArrays:
    """Return the arrays of a device's heads, with the global indices of its softmax rows where there is dropout.

    Dropout hashes these indices, so that the elements it drops do not depend on the mesh.
    """
    if sharding.ulysses_size > 1:
        arrays = ulysses.arrays_of_heads(sharding, arrays)
    if arrays.dropout_key is None:
        return arrays
    spec = sharding.shard_spec(sharding.spec.q_length, sharding.spec.kv_length)
    example, head = _index(sharding.batch) * spec.batch, _index(sharding.heads) * sharding.ulysses_size
    if sharding.ulysses_size > 1:
        head = head + jax.lax.axis_index(sharding.context) % sharding.ulysses_size
    examples = example + jnp.arange(spec.batch, dtype=jnp.int32)
    heads = head * spec.heads + jnp.arange(spec.heads, dtype=jnp.int32)
    rows = (examples[:, None] * sharding.spec.heads + heads[None]) * sharding.spec.q_length
    return arrays._replace(rows=rows)


def _index(axes: MeshAxes) -> Any:
    return jax.lax.axis_index(axes) if axes else 0


def _sum_of_replicas(sharding: AttentionSharding, gradient: Array | None, spec: PartitionSpec | None) -> Array | None:
    """Return a gradient summed over the devices that have the same shard of the array."""
    if gradient is None or spec is None:
        return None
    sharded = {name for entry in spec for name in entry_axes(entry)}
    axes = sharding.batch + sharding.context + sharding.heads
    return reduce_sum(gradient, tuple([name for name in axes if name not in sharded]))


def _shards(sharding: AttentionSharding, operands: _Operands) -> Shards:
    b, s, n = (axes or None for axes in (sharding.batch, sharding.context, sharding.heads))
    heads, bias = PartitionSpec(b, s, n, None), _bias_spec(sharding)
    qkv = (PartitionSpec(b, s, None, n, None),) if len(operands.qkv) == 1 else (heads,) * 3
    arrays = operands.arrays
    specs: dict[str, Any] = {
        "mask": None if arrays.mask is None else _scores_spec(sharding, arrays.mask.shape),
        "q_lengths": PartitionSpec(b),
        "kv_lengths": PartitionSpec(b),
        "segments": Segments(*(PartitionSpec(b),) * 4),  # type: ignore[arg-type]
        "bias": bias,
        "softmax_offset": PartitionSpec(n),
        "dropout_key": PartitionSpec(),
    }
    given = {name: spec for name, spec in specs.items() if getattr(arrays, name) is not None}
    learned = {name: spec for name, spec in given.items() if name in ("bias", "softmax_offset")}
    return Shards(
        mesh=sharding.mesh,
        args=_Operands(qkv, AttentionArrays(**given)),
        out=(heads, PartitionSpec(n) if sharding.spec.return_max_logit else None),
        # Max logits have no gradient.
        out_cotangents=(heads, None),
        cotangents=_Operands(qkv, AttentionArrays(**learned)),
        axis_names=sharding.axis_names,
    )


def _bias_spec(sharding: AttentionSharding) -> PartitionSpec | None:
    shape = sharding.spec.bias_shape
    if shape is None or sharding.spec.bias_type != "alibi":
        return None if shape is None else _scores_spec(sharding, shape)
    slopes = (sharding.batch or None, sharding.heads or None)
    return PartitionSpec(*slopes[-len(shape) :])


def _scores_spec(sharding: AttentionSharding, shape: tuple[int, ...]) -> PartitionSpec:
    """Return how an array ``[b | 1, n | 1, sq | 1, skv | 1]`` is sharded."""
    # Rows only where every device has all keys for them: after Ulysses a device has all rows, in natural order, of its
    # heads, which it takes by itself (`ulysses.arrays_of_heads`).
    rows = (sharding.context or None) if sharding.gathers else None
    axes = (sharding.batch or None, sharding.heads or None, rows, None)
    return PartitionSpec(*(names if size > 1 else None for size, names in zip(shape, axes, strict=True)))
