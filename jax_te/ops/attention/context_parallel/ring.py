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

from jax_te.ops.attention.context_parallel import part
from jax_te.ops.attention.context_parallel.call import MeshCall, rank_positions
from jax_te.ops.attention.softmax_offset import offset_gradient, offset_of
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, MaskType, unpack
from jax_te.typing import Array

T = TypeVar("T")


class Share(NamedTuple):
    """What a rank computes of its queries' scores with some keys: which rows and columns, under which mask."""

    rows: slice
    columns: slice
    mask_type: MaskType


TOGETHER = 4
"""Parts that are added up at a time: each addition reads and writes a sum in fp32, and each part takes memory."""


def forward(call: MeshCall, qkv: QKV, arrays: AttentionArrays) -> part.Result:
    """Attention of a rank's queries."""
    q, k, v = unpack(qkv)
    parts: list[part.Result] = []
    for step in range(call.ring_ranks):
        (k, v), parts = jax.lax.optimization_barrier(((k, v), parts))  # or all moves would come first
        ahead = _move(call, k, v) if step + 1 < call.ring_ranks else (k, v)  # under way while the rest is computed

        def attend(share: Share, k: Array = k, v: Array = v, step: int = step) -> part.Result:
            rows, columns = share.rows, share.columns
            spec, there = _part(call, arrays, step, share, q.shape[1], k.shape[1])
            out, log_sum, max_logit = part.forward(call, (q[:, rows], k[:, columns], v[:, columns]), spec, there)
            size = q.shape[1]
            return part.Result(part.put(out, rows, 1, size), part.put(log_sum, rows, 2, size, fill=-jnp.inf), max_logit)

        parts.append(_seen_at(call, step, attend, _nothing, (q.shape[1], k.shape[1])))
        if len(parts) == TOGETHER or step + 1 == call.ring_ranks:
            parts = [part.merge(parts)]
        k, v = ahead
    out, log_sum, max_logit = parts[0]
    offset = offset_of(call.part(q.shape[1], k.shape[1]), arrays)
    if offset is not None:
        whole = jnp.logaddexp(log_sum, jnp.broadcast_to(offset, log_sum.shape))
        out, log_sum = out * part.per_query(part.share(log_sum, whole)), whole
    return part.Result(out.astype(q.dtype), log_sum, max_logit)


def _nothing(like: part.Result) -> part.Result:
    """Of no keys."""
    out, log_sum, max_logit = like
    low = None if max_logit is None else jnp.full(max_logit.shape, -jnp.inf, max_logit.dtype)
    return part.Result(jnp.zeros(out.shape, out.dtype), jnp.full(log_sum.shape, -jnp.inf, log_sum.dtype), low)


class Found(NamedTuple):
    """Gradients of one step, of all of a rank's queries, keys and values, and of the bias."""

    q: Array
    k: Array
    v: Array
    bias: Array | None


def backward(call: MeshCall, qkv: QKV, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array) -> part.Gradients:
    """Gradients of a rank's queries, keys and values; those of keys and values follow them, a step behind."""
    q, k, v = unpack(qkv)
    dq: list[Array] = []
    d_bias: list[Array] = []
    behind: tuple[Array, ...] = ()  # gradients of the keys and values of the last step, on their way
    for step in range(call.ring_ranks):
        (k, v), behind, dq = jax.lax.optimization_barrier(((k, v), behind, dq))
        moved = _move(call, *((k, v) if step + 1 < call.ring_ranks else ()), *behind)
        ahead, behind = (moved[:2], moved[2:]) if step + 1 < call.ring_ranks else ((k, v), moved)

        def attend(share: Share, k: Array = k, v: Array = v, step: int = step) -> Found:
            rows, columns = share.rows, share.columns
            spec, there = _part(call, arrays, step, share, q.shape[1], k.shape[1])
            here = (q[:, rows], k[:, columns], v[:, columns])
            found = part.backward(call, here, spec, there, out[:, rows], log_sum[:, :, rows], g[:, rows])
            dq, dk, dv = unpack(found.qkv)
            size = k.shape[1]
            dk, dv = part.put(dk, columns, 1, size), part.put(dv, columns, 1, size)
            return Found(part.put(dq, rows, 1, q.shape[1]), dk, dv, found.bias)

        found = _seen_at(call, step, attend, _zeros, (q.shape[1], k.shape[1]))
        dq, d_bias = [*dq, found.q], [*d_bias, *(() if found.bias is None else (found.bias,))]
        if len(dq) == TOGETHER or step + 1 == call.ring_ranks:
            dq, d_bias = [part.total(dq)], [part.total(d_bias)] if d_bias else []
        behind = (found.k + behind[0], found.v + behind[1]) if behind else (found.k, found.v)
        k, v = ahead
    dk, dv = _move(call, *behind)
    offset = arrays.softmax_offset
    d_offset = None if offset is None else offset_gradient(offset, log_sum, out, g).astype(offset.dtype)
    whole_bias = None if not d_bias or arrays.bias is None else d_bias[0].astype(arrays.bias.dtype)
    return part.Gradients((dq[0].astype(q.dtype), dk, dv), whole_bias, d_offset)


def _zeros(like: Found) -> Found:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


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


def _seen_at(
    call: MeshCall, step: int, attend: Callable[[Share], T], nothing: Callable[[T], T], sizes: tuple[int, int]
) -> T:
    """``attend`` to what a rank sees at a step; where that is nothing, ``nothing`` of a result's shape."""
    before, behind = _shares(call, step, sizes)
    assert before is not None
    if before == behind:
        return attend(before)
    return jax.lax.cond(
        step <= _place(call),
        lambda: attend(before),
        lambda: nothing(jax.eval_shape(lambda: attend(before))) if behind is None else attend(behind),
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
