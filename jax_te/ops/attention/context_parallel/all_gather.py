"""Every rank gathers all keys and values; its own are queries.

Plain JAX is told the places of queries and keys, whatever their order. cuDNN has masks along a diagonal only: for it,
keys are put in natural order, and each chunk of queries sees those up to its own end, aligned with its last query.
Which keys those are depends on the rank: every rank has a program of its own, or, where only the devices know the
lengths of sequences, tells cuDNN how many there are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops.attention.context_parallel import part
from jax_te.ops.attention.context_parallel.call import MeshCall, rank_positions
from jax_te.ops.attention.context_parallel.order import chunk_order
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.typing import Array


def forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> part.Result:
    """Attention of a rank's queries."""
    q, k, v = unpack(qkv)
    k, v = _gather(call, k), _gather(call, v)
    if call.backend == "xla":
        return part.forward(call, (q, k, v), *_placed(call, arrays))

    def attend(rank: Any) -> part.Result:
        results = [
            part.forward(call, (q[:, view.rows], k[:, view.columns], v[:, view.columns]), view.spec, view.arrays)
            for view in _views(call, arrays, rank)
        ]
        logits = [result.max_logit for result in results if result.max_logit is not None]
        return part.Result(
            jnp.concatenate([result.out for result in results], axis=1),
            jnp.concatenate([result.log_sum for result in results], axis=2),
            functools.reduce(jnp.maximum, logits) if logits else None,
        )

    return _of_rank(call, attend)


def backward(call: MeshCall, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array) -> part.Gradients:
    """Gradients of a rank's queries, and of its keys and values, summed over all ranks."""
    q, k, v = unpack(qkv)
    k, v = _gather(call, k), _gather(call, v)

    def differentiate(rank: Any) -> part.Gradients:
        d_queries, d_keys, d_values, d_offsets = [], [], [], []
        for view in _views(call, arrays, rank):
            rows, columns = view.rows, view.columns
            here = (q[:, rows], k[:, columns], v[:, columns])
            found = part.backward(call, here, view.spec, view.arrays, out[:, rows], log_sum[:, :, rows], g[:, rows])
            dq, dk, dv = unpack(found.qkv)
            d_queries.append(dq)
            d_keys.append(_among_all(call, view, dk))
            d_values.append(_among_all(call, view, dv))
            d_offsets += [] if found.offset is None else [found.offset]
        dq = jnp.concatenate(d_queries, axis=1)
        dk, dv = (part.total(parts).astype(k.dtype) for parts in (d_keys, d_values))
        return part.Gradients((dq, dk, dv), None, functools.reduce(jnp.add, d_offsets) if d_offsets else None)

    if call.backend == "xla":
        found = part.backward(call, (q, k, v), *_placed(call, arrays), out, log_sum, g)
    else:
        found = _of_rank(call, differentiate)
    dq, dk, dv = unpack(found.qkv)
    return found._replace(qkv=(dq, _scatter(call, dk), _scatter(call, dv)))


class View(NamedTuple):
    """Some of a rank's queries, and the keys that cuDNN is given with them."""

    rows: slice
    columns: slice
    spec: AttentionSpec
    arrays: AttentionArrays
    seen: Array | None
    """Which of these keys the queries see at all, bool ``[b | 1, columns]``; None: all of them."""


def part_specs(call: MeshCall) -> list[AttentionSpec]:
    """What cuDNN is asked for: the descriptions of all chunks."""
    if not _is_static(call):
        return [_chunk_spec(call)]
    chunks = [chunk for rank in range(call.context_ranks) for chunk in _chunks(call, rank)]
    return list(dict.fromkeys(_static_view(call, rows, start)[1] for rows, start in chunks))


def _is_static(call: MeshCall) -> bool:
    """Whether it is known before the call which keys a chunk sees."""
    return call.spec.is_causal and not call.spec.is_padding


def _of_rank(call: MeshCall, compute: Any) -> Any:
    rank = jax.lax.axis_index(call.context_name)
    if not _is_static(call):
        return compute(rank)
    return jax.lax.switch(rank, [functools.partial(compute, other) for other in range(call.context_ranks)])


def _views(call: MeshCall, arrays: AttentionArrays, rank: Any) -> list[View]:
    views = []
    for rows, start in _chunks(call, rank):
        if _is_static(call):
            columns, spec = _static_view(call, rows, start)
            views.append(View(rows, columns, spec, arrays, None))
        else:
            spec, there = _chunk(call, arrays, start)
            seen = None if there.kv_lengths is None and there.segments is None else _seen(spec, there)
            views.append(View(rows, slice(0, call.spec.kv_length), spec, there, seen))
    return views


def _static_view(call: MeshCall, rows: slice, start: int) -> tuple[slice, AttentionSpec]:
    """The keys that a chunk sees, and its description."""
    size, spec = rows.stop - rows.start, call.spec
    behind = spec.kv_length - spec.q_length if spec.is_bottom_right else 0
    first = max(start + behind - spec.window[0], 0) if spec.window[0] >= 0 else 0
    columns = slice(first, start + size + behind)
    return columns, call.part(size, columns.stop - columns.start, "causal_bottom_right")


def _among_all(call: MeshCall, view: View, gradient: Array) -> Array:
    """The gradient of a view's keys among those of all; a kernel need not write those that its queries do not see."""
    if view.seen is not None:
        gradient = jnp.where(view.seen[..., None, None], gradient, jnp.zeros_like(gradient))
    return part.put(gradient, view.columns, 1, call.spec.kv_length)


def _chunk_spec(call: MeshCall) -> AttentionSpec:
    mask_type = "padding_causal_bottom_right" if call.spec.is_causal else call.spec.mask_type
    (rows, _), *_ = _chunks(call, 0)
    return call.part(rows.stop - rows.start, call.spec.kv_length, mask_type)


def _gather(call: MeshCall, x: Array) -> Array:
    x = jax.lax.all_gather(x, call.context_name, axis=1, tiled=True)
    return _reordered(call, x, back=True) if _natural(call) else x


def _scatter(call: MeshCall, x: Array) -> Array:
    x = _reordered(call, x, back=False) if _natural(call) else x
    return jax.lax.psum_scatter(x, call.context_name, scatter_dimension=1, tiled=True)


def _natural(call: MeshCall) -> bool:
    return call.load_balanced and call.backend != "xla" and call.spec.mask_type != "no_mask"


def _reordered(call: MeshCall, x: Array, *, back: bool) -> Array:
    order = chunk_order(call.context_ranks)
    chunks = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([chunks[place] for place in (np.argsort(order) if back else order)], axis=1)


def _placed(call: MeshCall, arrays: AttentionArrays) -> tuple[AttentionSpec, AttentionArrays]:
    rank, total = jax.lax.axis_index(call.context_name), call.spec.kv_length
    keys = jnp.concatenate([rank_positions(call, other, total) for other in range(call.context_ranks)])
    return part.placed(call, arrays, rank_positions(call, rank, call.spec.q_length), keys)


def _chunks(call: MeshCall, rank: Any) -> list[tuple[slice, Any]]:
    """Which rows of a rank's queries belong together, and the place of the first of them."""
    ranks = call.context_ranks
    if not call.load_balanced or call.spec.mask_type == "no_mask":
        size = call.spec.q_length // ranks
        return [(slice(0, size), rank * size)]
    size = call.spec.q_length // (2 * ranks)
    return [(slice(0, size), rank * size), (slice(size, 2 * size), (2 * ranks - 1 - rank) * size)]


def _chunk(call: MeshCall, arrays: AttentionArrays, start: Array) -> tuple[AttentionSpec, AttentionArrays]:
    """One chunk for cuDNN, by how many of its queries there are, and how many keys up to the last of them."""
    spec = _chunk_spec(call)
    segments = arrays.segments
    if segments is not None:
        return spec, arrays._replace(segments=_segments_in(segments, start, spec))
    if arrays.q_lengths is None or arrays.kv_lengths is None:
        return spec, arrays
    queries, keys = jnp.clip(arrays.q_lengths - start, 0, spec.q_length), arrays.kv_lengths
    if spec.is_causal:
        behind = arrays.kv_lengths - arrays.q_lengths if call.spec.is_bottom_right else 0
        keys = jnp.clip(start + queries + behind, 0, arrays.kv_lengths)
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
    assert arrays.q_lengths is not None
    assert arrays.kv_lengths is not None
    return (index < arrays.kv_lengths[:, None]) & (arrays.q_lengths > 0)[:, None]
