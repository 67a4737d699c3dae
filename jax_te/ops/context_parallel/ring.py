"""Keys and values travel around a ring of ranks; each adds its queries' attention to those that are with it.

Under a causal mask a rank sees, of keys from elsewhere, all or none in natural order, and in zig-zag order always one
half of the scores: all queries and the early keys of a rank before it, the late queries and all keys of one behind it.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Transformer Engine's ring attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_te.ops.attention_spec import QKV, AttentionArrays, AttentionSpec, MaskType, unpack
from jax_te.ops.context_parallel import part
from jax_te.ops.context_parallel.call import MeshCall, rank_positions
from jax_te.ops.softmax_offset import offset_gradient, offset_of
from jax_te.typing import Array

T = TypeVar("T")


class Share(NamedTuple):
    """What a rank computes of its queries' scores with some keys: which rows and columns, under which mask."""

    rows: slice
    columns: slice
    mask_type: MaskType


def forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> part.Result:
    """Attention of a rank's queries."""
    q, k, v = unpack(qkv)
    merged: part.Result | None = None
    for step in range(call.ring_ranks):
        (k, v), merged = jax.lax.optimization_barrier(((k, v), merged))  # or all moves would come first
        ahead = _move(call, k, v) if step + 1 < call.ring_ranks else (k, v)  # under way while the rest is computed

        def attend(
            share: Share, k: Array = k, v: Array = v, step: int = step, merged: part.Result | None = merged
        ) -> part.Result:
            rows, columns = share.rows, share.columns
            spec, there = _part(call, arrays, step, share, q.shape[1], k.shape[1])
            found = part.forward(call, (q[:, rows], k[:, columns], v[:, columns]), spec, there)
            return found._replace(out=found.out.astype(jnp.float32)) if merged is None else _merge(merged, found, rows)

        merged = _seen_at(call, step, attend, merged, (q.shape[1], k.shape[1]))
        k, v = ahead
    assert merged is not None
    out, log_sum, max_logit = merged
    offset = offset_of(call.part(q.shape[1], k.shape[1]), arrays)
    if offset is not None:
        whole = jnp.logaddexp(log_sum, jnp.broadcast_to(offset, log_sum.shape))
        out, log_sum = out * part.per_query(part.share(log_sum, whole)), whole
    return part.Result(out.astype(q.dtype), log_sum, max_logit)


def _merge(merged: part.Result, found: part.Result, rows: slice) -> part.Result:
    """What was merged, with attention of some of the queries to more keys."""
    more = part.merge(part.Result(merged.out[:, rows], merged.log_sum[:, :, rows], merged.max_logit), found)
    out, log_sum = _put(merged.out, more.out, rows, 1), _put(merged.log_sum, more.log_sum, rows, 2)
    return part.Result(out, log_sum, more.max_logit)


class Found(NamedTuple):
    """Gradients of a rank's queries and of the bias, all so far, and those of the keys and values of one step."""

    q: Array
    bias: Array | None
    k: Array
    v: Array


def backward(call: MeshCall, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array) -> part.Gradients:
    """Gradients of a rank's queries, keys and values; those of keys and values follow them, a step behind."""
    q, k, v = unpack(qkv)
    found: Found | None = None
    behind: tuple[Array, ...] = ()  # gradients of the keys and values of the last step, on their way
    for step in range(call.ring_ranks):
        (k, v), behind, found = jax.lax.optimization_barrier(((k, v), behind, found))
        moved = _move(call, *((k, v) if step + 1 < call.ring_ranks else ()), *behind)
        ahead, behind = (moved[:2], moved[2:]) if step + 1 < call.ring_ranks else ((k, v), moved)

        def attend(share: Share, k: Array = k, v: Array = v, step: int = step, so_far: Found | None = found) -> Found:
            rows, columns = share.rows, share.columns
            spec, there = _part(call, arrays, step, share, q.shape[1], k.shape[1])
            here = (q[:, rows], k[:, columns], v[:, columns])
            more = part.backward(call, here, spec, there, out[:, rows], log_sum[:, :, rows], g[:, rows])
            dq, dk, dv = unpack(more.qkv)
            dq, dbias = dq.astype(jnp.float32), None if more.bias is None else more.bias.astype(jnp.float32)
            if so_far is not None:
                dq = _put(so_far.q, so_far.q[:, rows] + dq, rows, 1)
                dbias = None if dbias is None or so_far.bias is None else so_far.bias + dbias
            return Found(dq, dbias, _put(jnp.zeros_like(k), dk, columns, 1), _put(jnp.zeros_like(v), dv, columns, 1))

        nothing = None if found is None else found._replace(k=jnp.zeros_like(k), v=jnp.zeros_like(v))
        found = _seen_at(call, step, attend, nothing, (q.shape[1], k.shape[1]))
        behind = (found.k + behind[0], found.v + behind[1]) if behind else (found.k, found.v)
        k, v = ahead
    assert found is not None
    dk, dv = _move(call, *behind)
    offset, d_bias = arrays.softmax_offset, found.bias
    d_offset = None if offset is None else offset_gradient(offset, log_sum, out, g).astype(offset.dtype)
    if d_bias is not None and arrays.bias is not None:
        d_bias = d_bias.astype(arrays.bias.dtype)
    return part.Gradients((found.q.astype(q.dtype), dk, dv), d_bias, d_offset)


def _put(x: Array, part_of_it: Array, taken: slice, axis: int) -> Array:
    """``x`` with a part exchanged. Not by ``x.at[...].set``: its empty array of indices, an input that nothing reads,
    makes the compiler for GPUs crash inside of shard_map (Shardy of jax 0.11.2: unused inputs of manual computations).
    """
    if part_of_it.shape == x.shape:
        return part_of_it
    return jax.lax.dynamic_update_slice_in_dim(x, part_of_it, taken.start, axis)


def is_structured(call: MeshCall) -> bool:
    """Whether a rank sees all, half or none of the keys of any other, which it then need not compare by position."""
    spec = call.spec
    whole = spec.window[0] < 0 and (spec.is_causal or spec.window[1] < 0)
    return whole and (spec.mask_type == "no_mask" or (spec.mask_type == "causal" and spec.q_length == spec.kv_length))


def part_specs(call: MeshCall) -> list[AttentionSpec]:
    """What cuDNN is asked for: the descriptions of all shares."""
    sizes = call.spec.q_length // call.ring_ranks, call.spec.kv_length // call.ring_ranks
    specs: list[AttentionSpec] = []
    for share in (share for step in range(call.ring_ranks) for share in _shares(call, step, sizes)):
        if share is not None:
            spec = _spec(call, share, *(len(range(size)[taken]) for size, taken in zip(sizes, share[:2], strict=True)))
            specs += [] if spec in specs else [spec]
    return specs


def _shares(call: MeshCall, step: int, sizes: tuple[int, int]) -> tuple[Share | None, Share | None]:
    """What a rank sees of the keys from ``step`` ranks before it, and, if it has no such before it, behind it."""
    everything = slice(0, sizes[0]), slice(0, sizes[1])
    if step == 0 or not is_structured(call) or call.spec.mask_type == "no_mask":
        share = Share(*everything, call.spec.mask_type)
        return share, share
    if not call.load_balanced:
        return Share(*everything, "no_mask"), None
    early = slice(0, sizes[1] // 2)
    late = slice(sizes[0] // 2, sizes[0])
    return Share(everything[0], early, "no_mask"), Share(late, everything[1], "no_mask")


def _seen_at(call: MeshCall, step: int, attend: Callable[[Share], T], so_far: T | None, sizes: tuple[int, int]) -> T:
    """``attend`` to what a rank sees at a step; ``so_far`` where that is nothing, never at step 0."""
    before, behind = _shares(call, step, sizes)
    assert before is not None
    if before == behind:
        return attend(before)
    return jax.lax.cond(
        step <= _place(call),
        lambda: attend(before),
        lambda: so_far if behind is None else attend(behind),
    )


def _part(
    call: MeshCall, arrays: AttentionArrays, step: int, share: Share, rows: int, columns: int
) -> tuple[AttentionSpec, AttentionArrays]:
    if call.backend != "xla":
        rows, columns = len(range(rows)[share.rows]), len(range(columns)[share.columns])
        return _spec(call, share, rows, columns), arrays._replace(softmax_offset=None)
    place = _place(call)
    queries = rank_positions(call, place, call.spec.q_length)[share.rows]
    keys = rank_positions(call, (place - step) % call.ring_ranks, call.spec.kv_length)[share.columns]
    spec, there = part.placed(call, arrays._replace(softmax_offset=None), queries, keys)
    if is_structured(call):
        return _spec(call, share, spec.q_length, spec.kv_length), there
    return dataclasses.replace(spec, softmax_type="vanilla"), there


def _spec(call: MeshCall, share: Share, rows: int, columns: int) -> AttentionSpec:
    return call.part(rows, columns, share.mask_type, softmax_type="vanilla")


def _place(call: MeshCall) -> Array:
    return jax.lax.axis_index(call.context_name) // call.exchange_ranks


def _move(call: MeshCall, *arrays: Array) -> tuple[Array, ...]:
    """To the next rank of the ring. Arrays of one shape go as one: one exchange at a time runs beside computation."""
    ranks, stride = call.context_ranks, call.exchange_ranks
    to_next = [(rank, (rank + stride) % ranks) for rank in range(ranks)]
    if len({(x.shape, x.dtype) for x in arrays}) > 1:
        return tuple(jax.lax.ppermute(x, call.context_name, to_next) for x in arrays)
    return tuple(jax.lax.ppermute(jnp.stack(arrays), call.context_name, to_next)) if arrays else ()
