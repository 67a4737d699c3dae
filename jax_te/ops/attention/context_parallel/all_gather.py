"""All-gather: every device has all keys and values, and its own shard of the queries.

Plain JAX takes the positions of queries and keys, in any order. cuDNN has masks along a diagonal only: for it, keys are
put in natural order, and each chunk of queries attends to the keys up to its own end, aligned with its last query.
Which keys those are depends on the device: every device has its own branch, or, where sequence lengths are known only
at run time, passes cuDNN the number of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops.attention.context_parallel import block
from jax_te.ops.attention.context_parallel.block import BlockGradients, BlockOutput
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding, shard_positions
from jax_te.ops.attention.context_parallel.zigzag import chunk_order
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.typing import Array


class QueryChunk(NamedTuple):
    """A chunk of a device's queries, and the keys that cuDNN receives with them."""

    rows: slice
    columns: slice
    spec: AttentionSpec
    arrays: AttentionArrays
    visible: Array | None
    """Which of these keys the queries attend to at all, bool ``[b | 1, columns]``; None: all of them."""


def forward(sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays) -> BlockOutput:
    """Return attention of a device's queries to all keys."""
    q, k, v = unpack(qkv)
    k, v = _all_gather(sharding, k), _all_gather(sharding, v)
    if sharding.backend == "xla":
        return block.forward(sharding, (q, k, v), *with_positions(sharding, arrays))

    def attend(device: Any) -> BlockOutput:
        results = [
            block.forward(sharding, (q[:, c.rows], k[:, c.columns], v[:, c.columns]), c.spec, c.arrays)
            for c in _query_chunks(sharding, arrays, device)
        ]
        out = jnp.concatenate([result.out for result in results], axis=1)
        log_sum = jnp.concatenate([result.log_sum for result in results], axis=2)
        return BlockOutput(out, log_sum, block.max_logits(results))

    return _on_device(sharding, attend)


def backward(
    sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
) -> BlockGradients:
    """Return the gradients of a device's queries, and of its keys and values, summed over all devices."""
    q, k, v = unpack(qkv)
    # All-gathered again: residuals are shards, because a layer's gathered keys would stay in memory until its backward.
    k, v = _all_gather(sharding, k), _all_gather(sharding, v)

    def differentiate(device: Any) -> BlockGradients:
        d_queries, d_keys, d_values = [], [], []
        d_offset: Array | None = None
        for chunk in _query_chunks(sharding, arrays, device):
            rows, columns = chunk.rows, chunk.columns
            operands, rest = (q[:, rows], k[:, columns], v[:, columns]), (out[:, rows], log_sum[:, :, rows], g[:, rows])
            gradients = block.backward(sharding, operands, chunk.spec, chunk.arrays, *rest)
            dq, dk, dv = unpack(gradients.qkv)
            d_queries.append(dq)
            d_keys.append(_of_all_keys(sharding, chunk, dk))
            d_values.append(_of_all_keys(sharding, chunk, dv))
            d_offset = gradients.offset if d_offset is None else d_offset + gradients.offset  # type: ignore[operator]
        dq = jnp.concatenate(d_queries, axis=1)
        dk, dv = (block.sum_float32(chunks).astype(k.dtype) for chunks in (d_keys, d_values))
        return BlockGradients((dq, dk, dv), None, d_offset)

    if sharding.backend == "xla":
        gradients = block.backward(sharding, (q, k, v), *with_positions(sharding, arrays), out, log_sum, g)
    else:
        gradients = _on_device(sharding, differentiate)
    dq, dk, dv = unpack(gradients.qkv)
    return gradients._replace(qkv=(dq, _reduce_scatter(sharding, dk), _reduce_scatter(sharding, dv)))


def block_specs(sharding: AttentionSharding) -> list[AttentionSpec]:
    """Return the specs of all calls of cuDNN."""
    if not _is_static(sharding):
        return [_dynamic_spec(sharding)]
    chunks = [chunk for device in range(sharding.context_shards) for chunk in _chunks(sharding, device)]
    return list(dict.fromkeys(_static_columns(sharding, rows, start)[1] for rows, start in chunks))


def _is_static(sharding: AttentionSharding) -> bool:
    """Return whether the keys that a chunk attends to are known while tracing."""
    return sharding.spec.is_causal and not sharding.spec.is_padding


def _on_device(sharding: AttentionSharding, compute: Any) -> Any:
    index = jax.lax.axis_index(sharding.context)
    if not _is_static(sharding):
        return compute(index)
    # A branch for each device, with only the keys that its queries attend to: cuDNN's sizes are static, so the first
    # device would otherwise compute as much as the last.
    return jax.lax.switch(index, [functools.partial(compute, device) for device in range(sharding.context_shards)])


def _query_chunks(sharding: AttentionSharding, arrays: AttentionArrays, device: Any) -> list[QueryChunk]:
    chunks = []
    for rows, start in _chunks(sharding, device):
        if _is_static(sharding):
            columns, spec = _static_columns(sharding, rows, start)
            chunks.append(QueryChunk(rows, columns, spec, arrays, None))
        else:
            spec, local = _dynamic_chunk(sharding, arrays, start)
            visible = None if local.kv_lengths is None and local.segments is None else _visible(spec, local)
            chunks.append(QueryChunk(rows, slice(0, sharding.spec.kv_length), spec, local, visible))
    return chunks


def _static_columns(sharding: AttentionSharding, rows: slice, start: int) -> tuple[slice, AttentionSpec]:
    """Return the keys that a chunk attends to, and its description."""
    size, spec = rows.stop - rows.start, sharding.spec
    behind = spec.kv_length - spec.q_length if spec.is_bottom_right else 0
    first = max(start + behind - spec.window[0], 0) if spec.window[0] >= 0 else 0
    columns = slice(first, start + size + behind)
    return columns, sharding.shard_spec(size, columns.stop - columns.start, "causal_bottom_right")


def _of_all_keys(sharding: AttentionSharding, chunk: QueryChunk, gradient: Array) -> Array:
    """Return the gradient of a chunk's keys as that of all keys."""
    if chunk.visible is not None:
        # cuDNN need not write the gradients of keys that no query attends to: there may be garbage.
        gradient = jnp.where(chunk.visible[..., None, None], gradient, jnp.zeros_like(gradient))
    return block.pad_to(gradient, chunk.columns, 1, sharding.spec.kv_length)


def _dynamic_spec(sharding: AttentionSharding) -> AttentionSpec:
    mask_type = "padding_causal_bottom_right" if sharding.spec.is_causal else sharding.spec.mask_type
    (rows, _), *_ = _chunks(sharding, 0)
    return sharding.shard_spec(rows.stop - rows.start, sharding.spec.kv_length, mask_type)


def _all_gather(sharding: AttentionSharding, x: Array) -> Array:
    x = jax.lax.all_gather(x, sharding.context, axis=1, tiled=True)
    return _reordered(sharding, x, back=True) if _needs_natural_order(sharding) else x


def _reduce_scatter(sharding: AttentionSharding, x: Array) -> Array:
    x = _reordered(sharding, x, back=False) if _needs_natural_order(sharding) else x
    return jax.lax.psum_scatter(x, sharding.context, scatter_dimension=1, tiled=True)


def _needs_natural_order(sharding: AttentionSharding) -> bool:
    # Plain JAX compares positions, and without a mask the order of keys is irrelevant: neither needs a copy of all
    # keys.
    return sharding.load_balanced and sharding.backend != "xla" and sharding.spec.mask_type != "no_mask"


def _reordered(sharding: AttentionSharding, x: Array, *, back: bool) -> Array:
    order = chunk_order(sharding.context_shards)
    chunks = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([chunks[index] for index in (np.argsort(order) if back else order)], axis=1)


def with_positions(sharding: AttentionSharding, arrays: AttentionArrays) -> tuple[AttentionSpec, AttentionArrays]:
    """Return spec and arrays of a device's queries and all keys for plain JAX, with their positions."""
    index, total = jax.lax.axis_index(sharding.context), sharding.spec.kv_length
    keys = jnp.concatenate([shard_positions(sharding, other, total) for other in range(sharding.context_shards)])
    return block.with_positions(sharding, arrays, shard_positions(sharding, index, sharding.spec.q_length), keys)


def _chunks(sharding: AttentionSharding, device: Any) -> list[tuple[slice, Any]]:
    """Return the rows of a device's queries whose positions are contiguous, and the first of these positions."""
    shards = sharding.context_shards
    if not sharding.load_balanced or sharding.spec.mask_type == "no_mask":
        size = sharding.spec.q_length // shards
        return [(slice(0, size), device * size)]
    size = sharding.spec.q_length // (2 * shards)
    return [(slice(0, size), device * size), (slice(size, 2 * size), (2 * shards - 1 - device) * size)]


def _dynamic_chunk(
    sharding: AttentionSharding, arrays: AttentionArrays, start: Array
) -> tuple[AttentionSpec, AttentionArrays]:
    """Return spec and arrays of a chunk that tell cuDNN its number of queries, and of keys up to the last of them."""
    spec = _dynamic_spec(sharding)
    segments = arrays.segments
    if segments is not None:
        return spec, arrays._replace(segments=_segments_of_chunk(segments, start, spec))
    if arrays.q_lengths is None or arrays.kv_lengths is None:
        return spec, arrays
    queries, keys = jnp.clip(arrays.q_lengths - start, 0, spec.q_length), arrays.kv_lengths
    if spec.is_causal:
        behind = arrays.kv_lengths - arrays.q_lengths if sharding.spec.is_bottom_right else 0
        keys = jnp.clip(start + queries + behind, 0, arrays.kv_lengths)
    return spec, arrays._replace(q_lengths=queries, kv_lengths=keys.astype(jnp.int32))


def _segments_of_chunk(segments: Segments, start: Array, spec: AttentionSpec) -> Segments:
    """Return the packed sequences whose queries lie in a chunk, cut off at its ends."""
    end = segments.q_offsets + segments.q_lengths
    first, last = jnp.maximum(segments.q_offsets, start), jnp.minimum(end, start + spec.q_length)
    queries = jnp.maximum(last - first, 0)
    # A causal mask is aligned at the last query: the keys of queries behind the chunk are cut off.
    keys = segments.kv_lengths - (end - last) if spec.is_causal else segments.kv_lengths
    offsets, keys = jnp.where(queries > 0, first - start, 0), jnp.where(queries > 0, keys, 0)
    return Segments(offsets, queries, segments.kv_offsets, keys)


def _visible(spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return the keys that any query of a chunk attends to, bool ``[b | 1, skv]``."""
    index = jnp.arange(spec.kv_length)[None]
    if arrays.segments is not None:
        begin, length = arrays.segments.kv_offsets, arrays.segments.kv_lengths
        inside = (index[..., None] >= begin[:, None]) & (index[..., None] < (begin + length)[:, None])
        return jnp.any(inside, axis=-1)
    assert arrays.q_lengths is not None
    assert arrays.kv_lengths is not None
    return (index < arrays.kv_lengths[:, None]) & (arrays.q_lengths > 0)[:, None]
