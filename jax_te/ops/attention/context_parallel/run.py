"""Attention in one shard_map for forward and one for backward, so that JAX differentiates no collective, and kernels
that the compiler cannot split see one device's arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_te.ops.attention.context_parallel import all_gather as gather
from jax_te.ops.attention.context_parallel import ring, whole
from jax_te.ops.attention.context_parallel import ulysses as exchange
from jax_te.ops.attention.context_parallel.call import MeshAxes, MeshCall
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import QKV, AttentionArrays, unpack
from jax_te.typing import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_on_mesh(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """Output ``[b, sq, n, dv]`` and largest logits ``[n]`` or None, of arrays that are split over the mesh."""
    return _forward(call, qkv, arrays)[0]


def _forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> tuple[Any, Any]:
    out, max_logit, own = _forward_split(call, qkv, arrays)
    # As on one device: a remat policy that keeps this name does not run attention again.
    out, own = checkpoint_name(out, "context"), {**own, "log_sum": checkpoint_name(own["log_sum"], "context")}
    if call.exchange_ranks == 1:
        return (out, max_logit), (qkv, arrays, out, own)
    # Kept as the ranks had exchanged them, so that backward does not exchange them again.
    return (out, max_logit), (None, arrays, None, {**own, "out": checkpoint_name(own["out"], "context")})


def _backward(call: MeshCall, kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, AttentionArrays]:
    qkv, arrays, out, own = kept
    g = cotangents[0]
    if call.gathers or call.ring_ranks > 1:
        # Or the compiler finds that forward gathered or moved the same keys, and keeps all of them until now.
        qkv, own, g = jax.lax.optimization_barrier((qkv, own, g))
    d_qkv, d_bias, d_offset = _backward_split(call, qkv, arrays, out, own, g)
    if call.spec.packed and len(d_qkv) == 3:
        d_qkv = (jnp.stack(d_qkv, axis=2),)
    return d_qkv, AttentionArrays(bias=d_bias, softmax_offset=d_offset)


attention_on_mesh.defvjp(_forward, _backward)


# Under jits of their own for calls that no jit surrounds.
@functools.partial(jax.jit, static_argnums=0)
def _forward_split(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> Any:
    logits = PartitionSpec(call.heads or None) if call.spec.return_max_logit else None
    return _on_devices(
        call,
        _forward_here,
        (_operand_specs(call, len(qkv)), _array_specs(call, arrays)),
        (_operand_specs(call, 3)[0], logits, PartitionSpec(call.everywhere)),
    )(qkv, arrays)


@functools.partial(jax.jit, static_argnums=0)
def _backward_split(call: MeshCall, qkv: Any, arrays: AttentionArrays, out: Any, own: Any, g: Array) -> Any:
    others, (heads, *_) = _array_specs(call, arrays), _operand_specs(call, 3)
    operands = None if qkv is None else _operand_specs(call, len(qkv))
    # One array of all three is taken apart wherever keys and values go another way than queries.
    gradients = operands if operands is not None and not call.context else _operand_specs(call, 3)
    return _on_devices(
        call,
        _backward_here,
        (operands, others, None if out is None else heads, PartitionSpec(call.everywhere), heads),
        (gradients, others.bias, others.softmax_offset),
    )(qkv, arrays, out, own, g)


def _on_devices(call: MeshCall, fn: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        functools.partial(fn, call),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(call.everywhere),
        check_vma=False,
    )


def _forward_here(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> tuple[Array, Array | None, dict[str, Array]]:
    """On one device. What it keeps for backward has a dimension in front, for the devices."""
    kept = {}
    if call.exchange_ranks > 1:
        q, k, v = (exchange.to_heads(call, x) for x in unpack(qkv))
        kept |= {"q": q, "k": k, "v": v}
        qkv, arrays = (q, k, v), exchange.heads_of(call, arrays)
    out, log_sum, max_logit = _way(call).forward(call, qkv, _numbered(call, arrays))
    kept["log_sum"] = log_sum
    if call.exchange_ranks > 1:
        kept["out"] = out
        out = exchange.to_sequence(call, out)
        max_logit = None if max_logit is None else exchange.gather_heads(call, max_logit)
    if max_logit is not None and (call.batch or call.context):
        max_logit = jax.lax.pmax(max_logit, call.batch + call.context)
    return out, max_logit, jax.tree.map(lambda x: x[None], kept)


def _backward_here(
    call: MeshCall, qkv: QKV | None, arrays: AttentionArrays, out: Array | None, own: dict[str, Array], g: Array
) -> tuple[QKV, Array | None, Array | None]:
    own, given = {name: x[0] for name, x in own.items()}, arrays
    if qkv is None:
        qkv, out = (own["q"], own["k"], own["v"]), own["out"]
        g, arrays = exchange.to_heads(call, g), exchange.heads_of(call, arrays)
    found = _way(call).backward(call, qkv, _numbered(call, arrays), out, own["log_sum"], g)
    d_qkv, d_bias, d_offset = found
    if call.exchange_ranks > 1:
        q, k, v = (exchange.to_sequence(call, x) for x in unpack(d_qkv))
        d_qkv = (q, k, v)
        d_bias = exchange.whole_gradient(call, d_bias, given.bias)
        d_offset = exchange.whole_gradient(call, d_offset, given.softmax_offset)
    specs = _array_specs(call, given)
    return d_qkv, _summed(call, d_bias, specs.bias), _summed(call, d_offset, specs.softmax_offset)


def _way(call: MeshCall) -> Any:
    return gather if call.gathers else ring if call.ring_ranks > 1 else whole


def _numbered(call: MeshCall, arrays: AttentionArrays) -> AttentionArrays:
    """With the numbers of a device's rows of probabilities among those of the whole call, which dropout asks for."""
    if arrays.dropout_key is None:
        return arrays
    spec = call.part(call.spec.q_length, call.spec.kv_length)
    example, head = _index(call.batch) * spec.batch, _index(call.heads) * call.exchange_ranks
    if call.exchange_ranks > 1:
        head = head + jax.lax.axis_index(call.context_name) % call.exchange_ranks
    examples = example + jnp.arange(spec.batch, dtype=jnp.int32)
    heads = head * spec.heads + jnp.arange(spec.heads, dtype=jnp.int32)
    rows = (examples[:, None] * call.spec.heads + heads[None]) * call.spec.q_length
    return arrays._replace(rows=rows)


def _index(axes: MeshAxes) -> Any:
    return jax.lax.axis_index(axes) if axes else 0


def _summed(call: MeshCall, gradient: Array | None, spec: PartitionSpec | None) -> Array | None:
    """Over the devices that had the same part of an array."""
    if gradient is None or spec is None:
        return None
    over = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    axes = tuple(name for name in call.batch + call.context + call.heads if name not in over)
    return jax.lax.psum(gradient, axes) if axes else gradient


def _operand_specs(call: MeshCall, count: int) -> tuple[PartitionSpec, ...]:
    """Of queries, keys and values, or of one array of all three."""
    b, s, n = (axes or None for axes in (call.batch, call.context, call.heads))
    return (PartitionSpec(b, s, None, n, None),) if count == 1 else (PartitionSpec(b, s, n, None),) * 3


def _array_specs(call: MeshCall, arrays: AttentionArrays) -> Any:
    """How the arrays beside queries, keys and values are split; heads that ranks exchange they take by themselves."""
    b, n, rows = call.batch or None, call.heads or None, (call.context or None) if call.gathers else None

    def scores(x: Array) -> PartitionSpec:
        return PartitionSpec(
            *(axes if size > 1 else None for size, axes in zip(x.shape, (b, n, rows, None), strict=True))
        )

    by_dims = {1: lambda x: PartitionSpec(n), 2: lambda x: PartitionSpec(b, n), 4: scores}
    specs: dict[str, Any] = {
        "mask": scores,
        "q_lengths": lambda x: PartitionSpec(b),
        "kv_lengths": lambda x: PartitionSpec(b),
        "segments": lambda x: Segments(*(PartitionSpec(b),) * 4),  # type: ignore[arg-type]
        "bias": lambda x: by_dims[x.ndim](x),
        "softmax_offset": lambda x: PartitionSpec(n),
        "dropout_key": lambda x: PartitionSpec(),
    }
    given = {name: value for name, value in arrays._asdict().items() if value is not None}
    return AttentionArrays(**{name: specs[name](value) for name, value in given.items()})
