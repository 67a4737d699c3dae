"""Transport of tokens to the devices of their experts, and of the experts' outputs back.

Every device of a mesh runs this by itself. A dispatch is the exchange of tokens between devices and then the local
permutation into rows sorted by expert; a combination is the transpose of both, in the opposite order. So each is the
backward pass of the other, and neither scatters sums in a device-dependent order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.first_order import why_quantized
from jax_te.ops.integers import as_int32
from jax_te.ops.moe import permute
from jax_te.ops.moe.permute import plan_permutation
from jax_te.ops.moe.placement import ExpertPlacement
from jax_te.ops.moe.routing import within
from jax_te.ops.moe.row_groups import RowGroups, row_bound
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.wide import wide_dtype
from jax_te.quantize import TensorQuantizer, padded_size
from jax_te.sharding import REPLICATED, all_gather, all_to_all, flat, reduce_sum
from jax_te.typing import Array, DTypeLike


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Exchange of tokens between the devices of a mesh that have different experts. Hashable.

    Args:
        placement: mesh axes of tokens and experts.
        lead: sizes of the leading axes of one device's tokens ``[b, s, h]``.
        experts: number of experts on each device.
        received: number of tokens that each device receives, with its own; there may be fewer.
        balanced: number of rows of each device if all experts get the same number of tokens.
        rows: number of rows for which each device has room.
        limit: number of assignments of a token to an expert that a device takes. None: all.
        alignment: alignment of the rows of each expert, see `RowGroups`.
        slots: tokens that a device sends to each other one by all-to-all. None: tokens are all-gathered, and outputs
            reduce-scattered.
        fp8: whether tokens, and gradients of outputs, travel in FP8.
    """

    placement: ExpertPlacement
    lead: tuple[int, ...]
    experts: int
    received: int
    balanced: int
    rows: int
    limit: int | None
    alignment: int
    slots: int | None
    fp8: bool

    @property
    def destinations(self) -> int:
        """Number of devices among which the experts are split."""
        return self.placement.size(self.placement.experts)


class Assignments(NamedTuple):
    """Sources and destinations of one call's tokens and rows; their arrays have an axis ``[d]`` of devices in front.

    Args:
        permutation: permutation of the tokens that a device receives into its rows.
        slots: int32 ``[p, c]``, the token that is sent in each slot to each of ``p`` devices, or a number behind the
            last token; None if tokens are all-gathered.
        places: int32 ``[t, p]``, the slot of each token among those to each device, ``c`` if it is not sent there.
    """

    permutation: Any
    slots: Any
    places: Any


class Dispatch(NamedTuple):
    """One call's exchange of tokens.

    Args:
        transport: the exchange.
        assignments: sources and destinations.
        groups: rows of the experts on each device.
        overflow: fp32 ``[]``, number of assignments of a token to an expert for which there was no room, on all
            devices; always 0 without a bound.
    """

    transport: Transport
    assignments: Assignments
    groups: RowGroups
    overflow: Array


def transport_of(
    placement: ExpertPlacement,
    shape: tuple[int, ...],
    topk: int,
    num_experts: int,
    *,
    alignment: int,
    dispatcher: str,
    capacity: int | None,
    factor: float | None,
    fp8: bool,
) -> Transport:
    """Return the exchange for tokens ``[b, s, h]`` of the whole batch.

    Args:
        placement: mesh axes of tokens and experts.
        shape: shape of the tokens.
        topk: ``k``, experts of a token.
        num_experts: ``e``.
        alignment: alignment of the rows of each expert.
        dispatcher: ``"allgather"`` or ``"alltoall"``.
        capacity: the largest number of tokens that the router leaves an expert. None: any.
        factor: bound of the rows of a device, and under ``"alltoall"`` of the tokens that it takes from each other one,
            as a multiple of what it has if all experts get the same number of tokens. None: no bound.
        fp8: whether tokens travel to their experts, and gradients of outputs, in FP8.
    """
    parts = map(placement.size, placement.tokens)
    lead = tuple(size // number for size, number in zip(shape[:-1], parts, strict=True))
    own = math.prod(lead)
    devices, local = placement.size(placement.experts), num_experts // placement.size(placement.experts)
    copied = placement.size(placement.copied)
    balanced, slots = own * topk / devices, None
    if dispatcher == "alltoall" and devices > 1:
        slots = own if factor is None else min(own, math.ceil(balanced * factor))
    received = (own if slots is None else slots) * devices * copied
    rows = row_bound(received * min(topk, local), local, alignment=alignment)
    if capacity is not None:
        rows = min(rows, local * padded_size(min(capacity, received), alignment))
    limit = None if factor is None else math.ceil(own * copied * topk * factor)
    if limit is not None:
        rows = min(rows, row_bound(limit, local, alignment=alignment))
    return Transport(
        placement=placement,
        lead=lead,
        experts=local,
        received=received,
        balanced=own * copied * topk,
        rows=rows,
        limit=limit,
        alignment=alignment,
        slots=slots,
        fp8=fp8 and devices * copied > 1,
    )


def plan_dispatch(transport: Transport, experts: Array, kept: Array | None) -> Dispatch:
    """Return the exchange of a call.

    Args:
        transport: the exchange.
        experts: integers ``[b, s, k]``; no device takes an assignment to a number that no expert has.
        kept: bool ``[b, s, k]``, False for assignments that the router drops. None: all are kept.
    """
    placement = transport.placement
    experts = as_int32("experts", experts)
    there = within(experts, transport.destinations * transport.experts)
    kept = there if kept is None else kept & there
    tokens, each = placement.token_spec, placement.row_spec
    out = (Assignments(each, each, each), each, REPLICATED)  # type: ignore[arg-type]
    assignments, sizes, overflow = _planned(transport, placement.shards((tokens, tokens), out), (experts, kept))
    groups = RowGroups(sizes=sizes, rows=transport.rows, alignment=transport.alignment, placement=placement)
    return Dispatch(transport, assignments, groups, overflow)


def dispatch(x: Array, probs: Array, call: Dispatch) -> tuple[Array, Array]:
    """Return the rows of the experts on each device, and their probabilities.

    Args:
        x: tokens ``[b, s, h]``.
        probs: ``[b, s, k]``.
        call: the call's exchange.

    Returns:
        ``[d rows, h]`` and ``[d rows]``, see `RowGroups`; zeros in padding.
    """
    placement = call.transport.placement
    tokens, each = placement.token_spec, placement.row_spec
    shards = placement.shards(_Tokens(tokens, tokens, each), (each, each))
    return _dispatch(call.transport, shards, _Tokens(x, probs, call.assignments))


def combine(rows: Array, call: Dispatch) -> Array:
    """Return the sum of the rows of each token, ``[b, s, h]`` from ``rows [d rows, h]``."""
    placement = call.transport.placement
    shards = placement.shards(_Rows(placement.row_spec, placement.row_spec), placement.token_spec)
    return _combine(call.transport, shards, _Rows(rows, call.assignments))


class _Tokens(NamedTuple):
    x: Any
    probs: Any
    assignments: Any


class _Rows(NamedTuple):
    rows: Any
    assignments: Any


def _plan(transport: Transport, args: tuple[Array, Array]) -> tuple[Any, None]:
    """Return the assignments of one device, sizes of its groups, and the overflow of all."""
    experts, kept = (x.reshape(-1, x.shape[-1]) for x in args)
    placement, count = transport.placement, transport.destinations
    # An expert that does not exist: no device takes the assignment.
    experts, nowhere = jnp.where(kept, experts, count * transport.experts), count * transport.experts
    slots = places = None
    unsent = jnp.int32(0)
    if transport.slots is not None:
        slots, places, unsent = _sent(experts, transport)
    received = _exchange(experts, transport, slots, fill=nowhere)
    first = jax.lax.axis_index(placement.experts) * transport.experts if placement.experts else 0
    own = received - first
    mine = (own >= 0) & (own < transport.experts)
    taken = mine if transport.limit is None else _first(mine, transport)
    plan = plan_permutation(own, transport.experts, kept=taken, alignment=transport.alignment, bound=transport.rows)
    lost = jnp.sum(mine & ~taken, dtype=jnp.int32)
    # Devices that have the same rows lose the same ones, and count a part each.
    parts = placement.size(placement.copied)
    overflow = unsent.astype(jnp.float32) + lost.astype(jnp.float32) / parts
    tokens = flat(placement.tokens)
    overflow = jax.lax.psum(overflow, tokens) if tokens else overflow
    assignments = Assignments(plan._replace(groups=None), slots, places)
    return (jax.tree.map(lambda x: x[None], assignments), plan.groups.sizes[None], overflow), None


def _sent(experts: Array, transport: Transport) -> tuple[Array, Array, Array]:
    """Return the tokens in the slots to each device, each token's slots, and the number of assignments without one.

    Tokens keep their order, and the last ones are those that get no slot.
    """
    (t, _), count, slots = experts.shape, transport.destinations, transport.slots
    assert slots is not None
    to = experts // transport.experts
    goes = jnp.any(to[:, :, None] == jnp.arange(count, dtype=to.dtype)[None, None], axis=1)
    place = jnp.minimum(jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1, slots)
    places = jnp.where(goes, place, slots)
    # Behind the last slot: dropped by the update.
    tokens = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[:, None], places.shape)
    to_each = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], places.shape)
    filled = jnp.full((count, slots), t, jnp.int32).at[to_each, places].set(tokens, mode="drop")
    own = jnp.take_along_axis(places, jnp.minimum(to, count - 1), axis=1)
    return filled, places, jnp.sum((to < count) & (own >= slots), dtype=jnp.int32)


def _first(mine: Array, transport: Transport) -> Array:
    """Return the assignments ``[n, k]`` within the limit: the first tokens of all devices before the second ones."""
    assert transport.limit is not None
    placement, (_, k) = transport.placement, mine.shape
    sources = transport.destinations * placement.size(placement.copied)
    in_order = jnp.swapaxes(mine.reshape(sources, -1, k), 0, 1)
    number = jnp.cumsum(in_order.reshape(-1), dtype=jnp.int32).reshape(in_order.shape)
    return mine & (jnp.swapaxes(number, 0, 1).reshape(mine.shape) <= transport.limit)


def _exchange(x: Array, transport: Transport, slots: Array | None, fill: int = 0) -> Array:
    """Return the tokens that a device receives, ``[n, ...]``, of its own ``[t, ...]``."""
    axes, copied = transport.placement.experts, transport.placement.copied
    if slots is not None:
        sent = x.at[slots].get(mode="fill", fill_value=fill)
        x = all_to_all(sent, axes).reshape(-1, *x.shape[1:])
    elif axes:
        x = all_gather(x, (axes,))
    return all_gather(x, (copied,)) if copied else x


def _returned(x: Array, transport: Transport, places: Array | None) -> Array:
    """Return the sums over all devices for a device's tokens ``[t, ...]`` of what each made of the ones it received."""
    placement = transport.placement
    # Summands of features are added before the outputs travel: with the tensor axis in front they are nearest.
    x = reduce_sum(x, placement.features, (placement.copied,) if placement.copied else ())
    if places is None:
        return reduce_sum(x, placement.experts, (placement.experts,) if placement.experts else ())
    back = x.reshape(places.shape[1], -1, *x.shape[1:])
    back = all_to_all(back, placement.experts)
    wide = wide_dtype(x.dtype)
    found = (own.at[place].get(mode="fill", fill_value=0) for own, place in zip(back, places.T, strict=True))
    return sum(y.astype(wide) for y in found).astype(x.dtype)  # type: ignore[union-attr]


def _of_device(assignments: Assignments) -> Assignments:
    return jax.tree.map(lambda x: x[0], assignments)


def _rows_of(x: Array, transport: Transport, own: Assignments, dtype: DTypeLike) -> Array:
    """Return the rows of a device's experts, of tokens that travel in FP8 ``dtype`` if the transport says so."""
    if not transport.fp8:
        return permute.permute(_exchange(x, transport, own.slots), own.permutation)
    quantizer = TensorQuantizer(dtype=dtype)
    sent, _ = jax.vmap(lambda token: quantizer.quantize(token, None, axis=1, columnwise=False))(x[:, None])
    received = jax.tree.map(lambda leaf: _exchange(leaf, transport, own.slots), sent)
    return permute.permute(jax.vmap(lambda token: token.dequantize())(received)[:, 0], own.permutation)


def _tokens_of(rows: Array, transport: Transport, own: Assignments) -> Array:
    return _returned(permute.unpermute(rows, own.permutation), transport, own.places)


def _dispatch_fwd(transport: Transport, args: _Tokens) -> tuple[tuple[Array, Array], Any]:
    x, probs, own = args.x, args.probs, _of_device(args.assignments)
    rows = _rows_of(x.reshape(-1, x.shape[-1]), transport, own, jnp.float8_e4m3fn)
    received = _exchange(probs.reshape(-1, probs.shape[-1]), transport, own.slots)
    return (rows, permute.permute_probs(received, own.permutation)), args.assignments


def _dispatch_bwd(transport: Transport, assignments: Assignments, g: tuple[Array, Array]) -> tuple[_Tokens, None]:
    own, lead = _of_device(assignments), transport.lead
    dx = _tokens_of(g[0], transport, own)
    dprobs = _returned(permute.unpermute_probs(g[1], own.permutation), transport, own.places)
    return _Tokens(dx.reshape(*lead, -1), dprobs.reshape(*lead, -1), None), None


def _combine_fwd(transport: Transport, args: _Rows) -> tuple[Array, Assignments]:
    y = _tokens_of(args.rows, transport, _of_device(args.assignments))
    return y.reshape(*transport.lead, -1), args.assignments


def _combine_bwd(transport: Transport, assignments: Assignments, g: Array) -> tuple[_Rows, None]:
    g = g.reshape(-1, g.shape[-1])
    return _Rows(_rows_of(g, transport, _of_device(assignments), jnp.float8_e5m2), None), None


def _why_once(transport: Transport) -> str | None:
    return why_quantized("DispatchOptions(fp8=True)") if transport.fp8 else None


_planned = sharded_vjp(_plan, lambda *_: ((None, None), None))
_dispatch = sharded_vjp(_dispatch_fwd, _dispatch_bwd, once=_why_once)
_combine = sharded_vjp(_combine_fwd, _combine_bwd, once=_why_once)
