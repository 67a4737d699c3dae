"""Every rank gathers all keys and values; its own are queries.

Plain JAX is told the places of queries and keys, whatever their order. cuDNN has masks along a diagonal only: for it,
keys are put in natural order, and each chunk of queries sees those up to its own end, aligned with its last query.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops.attention_spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.context_parallel import part
from jax_te.ops.context_parallel.call import MeshCall, rank_positions
from jax_te.ops.context_parallel.order import chunk_order
from jax_te.ops.segments import Segments
from jax_te.typing import Array


def forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> part.Result:
    """Attention of a rank's queries."""
    q, k, v = unpack(qkv)
    k, v = _gather(call, k), _gather(call, v)
    if call.backend == "xla":
        return part.forward(call, (q, k, v), *_placed(call, arrays))
    results = []
    for rows, start in _chunks(call):
        results.append(part.forward(call, (q[:, rows], k, v), *_chunk(call, arrays, start)))
    logits = [result.max_logit for result in results if result.max_logit is not None]
    return part.Result(
        jnp.concatenate([result.out for result in results], axis=1),
        jnp.concatenate([result.log_sum for result in results], axis=2),
        jnp.max(jnp.stack(logits), axis=0) if logits else None,
    )


def backward(call: MeshCall, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array) -> part.Gradients:
    """Gradients of a rank's queries, and of its keys and values, summed over all ranks."""
    q, k, v = unpack(qkv)
    k, v = _gather(call, k), _gather(call, v)
    if call.backend == "xla":
        found = part.backward(call, (q, k, v), *_placed(call, arrays), out, log_sum, g)
        dq, dk, dv = unpack(found.qkv)
        return found._replace(qkv=(dq, _scatter(call, dk), _scatter(call, dv)))
    d_queries, d_offset = [], None
    d_keys, d_values = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    for rows, start in _chunks(call):
        spec, there = _chunk(call, arrays, start)
        here = (q[:, rows], k, v)
        found = part.backward(call, here, spec, there, out[:, rows], log_sum[:, :, rows], g[:, rows])
        dq, dk, dv = unpack(found.qkv)
        seen = _seen(spec, there)[..., None, None]
        d_queries.append(dq)
        d_keys += jnp.where(seen, dk, jnp.zeros_like(dk)).astype(jnp.float32)
        d_values += jnp.where(seen, dv, jnp.zeros_like(dv)).astype(jnp.float32)
        if found.offset is not None:
            d_offset = found.offset if d_offset is None else d_offset + found.offset
    d_keys, d_values = (_scatter(call, x.astype(k.dtype)) for x in (d_keys, d_values))
    return part.Gradients((jnp.concatenate(d_queries, axis=1), d_keys, d_values), None, d_offset)


def part_spec(call: MeshCall) -> AttentionSpec:
    """What cuDNN is asked for: the description of one chunk."""
    spec = call.spec
    mask_type = "padding_causal_bottom_right" if spec.is_causal else spec.mask_type
    rows = spec.q_length // call.context_ranks // (2 if call.load_balanced else 1)
    return call.part(rows, spec.kv_length, mask_type)


def _gather(call: MeshCall, x: Array) -> Array:
    x = jax.lax.all_gather(x, call.context_name, axis=1, tiled=True)
    return _reordered(call, x, back=True) if _natural(call) else x


def _scatter(call: MeshCall, x: Array) -> Array:
    x = _reordered(call, x, back=False) if _natural(call) else x
    return jax.lax.psum_scatter(x, call.context_name, scatter_dimension=1, tiled=True)


def _natural(call: MeshCall) -> bool:
    return call.load_balanced and call.backend != "xla"


def _reordered(call: MeshCall, x: Array, *, back: bool) -> Array:
    order = chunk_order(call.context_ranks)
    chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    return chunks[:, np.argsort(order) if back else np.asarray(order)].reshape(x.shape)


def _placed(call: MeshCall, arrays: AttentionArrays) -> tuple[AttentionSpec, AttentionArrays]:
    rank, total = jax.lax.axis_index(call.context_name), call.spec.kv_length
    keys = jnp.concatenate([rank_positions(call, other, total) for other in range(call.context_ranks)])
    return part.placed(call, arrays, rank_positions(call, rank, call.spec.q_length), keys)


def _chunks(call: MeshCall) -> list[tuple[slice, Array]]:
    """Which rows of a rank's queries belong together, and the place of the first of them."""
    rank, ranks = jax.lax.axis_index(call.context_name), call.context_ranks
    if not call.load_balanced:
        size = call.spec.q_length // ranks
        return [(slice(0, size), rank * size)]
    size = call.spec.q_length // (2 * ranks)
    return [(slice(0, size), rank * size), (slice(size, 2 * size), (2 * ranks - 1 - rank) * size)]


def _chunk(call: MeshCall, arrays: AttentionArrays, start: Array) -> tuple[AttentionSpec, AttentionArrays]:
    """One chunk for cuDNN, by how many of its queries there are, and how many keys up to the last of them."""
    spec = part_spec(call)
    segments = arrays.segments
    if segments is not None:
        return spec, arrays._replace(segments=_segments_in(segments, start, spec))
    if spec.mask_type == "no_mask":
        return spec, arrays
    whole = jnp.full((spec.batch,), call.spec.q_length, jnp.int32), jnp.full((spec.batch,), spec.kv_length, jnp.int32)
    q_lengths = whole[0] if arrays.q_lengths is None else arrays.q_lengths
    kv_lengths = whole[1] if arrays.kv_lengths is None else arrays.kv_lengths
    queries = jnp.clip(q_lengths - start, 0, spec.q_length)
    keys = kv_lengths
    if spec.is_causal:
        behind = kv_lengths - q_lengths if call.spec.is_bottom_right else 0
        keys = jnp.clip(start + queries + behind, 0, kv_lengths)
    return spec, arrays._replace(q_lengths=queries, kv_lengths=keys.astype(jnp.int32))


def _segments_in(segments: Segments, start: Array, spec: AttentionSpec) -> Segments:
    """The parts of packed sequences whose queries lie in a chunk."""
    end = segments.q_offsets + segments.q_lengths
    first, last = jnp.maximum(segments.q_offsets, start), jnp.minimum(end, start + spec.q_length)
    queries = jnp.maximum(last - first, 0)
    keys = segments.kv_lengths - (end - last) if spec.is_causal else segments.kv_lengths
    return Segments(
        jnp.where(queries > 0, first - start, 0), queries, segments.kv_offsets, jnp.where(queries > 0, keys, 0)
    )


def _seen(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Keys that a chunk sees, bool ``[b | 1, skv]``: a kernel need not write the gradients of the others."""
    index = jnp.arange(spec.kv_length)[None]
    if arrays.segments is not None:
        s = arrays.segments
        inside = (index[..., None] >= s.kv_offsets[:, None]) & (
            index[..., None] < (s.kv_offsets + s.kv_lengths)[:, None]
        )
        return jnp.any(inside, axis=-1)
    if arrays.kv_lengths is None or arrays.q_lengths is None:
        return index >= 0
    return (index < arrays.kv_lengths[:, None]) & (arrays.q_lengths > 0)[:, None]
