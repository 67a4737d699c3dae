"""What each way of context parallelism can run, and with which backend."""

from __future__ import annotations

import dataclasses

from jax_te.ops.attention.context_parallel import all_gather as gather
from jax_te.ops.attention.context_parallel import ring
from jax_te.ops.attention.context_parallel.call import MeshCall
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.ops.backend import BackendName, Choice, explain_backend


def check_call(call: MeshCall, arrays: AttentionArrays) -> None:
    """Raise ValueError for what no way of exchange can do, or not the one asked for: sizes that do not divide over the
    mesh, and arrays that cannot be split.
    """
    spec, ranks, tensor = call.spec, call.context_ranks, call.ranks(call.heads)
    chunks = ranks * (2 if call.load_balanced else 1)
    for name, size, parts, axes in (
        ("queries", spec.q_length, chunks, call.context),
        ("keys", spec.kv_length, chunks, call.context),
        ("examples", spec.batch, call.ranks(call.batch), call.batch),
        ("query heads", spec.heads, tensor, call.heads),
        ("key/value heads (groups)", spec.groups, tensor, call.heads),
    ):
        if size % parts:
            twice = ", twice as many in zig-zag order" if parts == 2 * ranks and axes == call.context else ""
            raise ValueError(
                f"attention on a mesh: {size} {name} do not divide over mesh axes {'*'.join(axes)} = "
                f"{call.ranks(axes)}{twice}; pad them or change the mesh"
            )
    kind, sizes = call.cp.cp_comm_type, call.cp.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p" and ranks > 1 and (sizes is None or sizes[0] * sizes[1] != ranks):
        raise ValueError(
            "cp_comm_type 'a2a+p2p' needs hierarchical_context_parallel_sizes=(a2a ranks, p2p ranks) with a product of "
            f"{ranks}, as many as the mesh has context ranks; got {sizes}"
        )
    exchange = call.exchange_ranks
    if (spec.heads // tensor) % exchange or (spec.groups // tensor) % exchange:
        raise ValueError(
            f"cp_comm_type {kind!r} exchanges heads among {exchange} ranks, but each tensor rank has "
            f"{spec.heads // tensor} query and {spec.groups // tensor} key/value heads, which do not divide; take "
            "'p2p', 'all_gather', or 'a2a+p2p' with fewer a2a ranks"
        )
    if call.ring_ranks > 1 and (arrays.mask is not None or spec.bias_type in ("pre_scale_bias", "post_scale_bias")):
        what = "mask" if arrays.mask is not None else spec.bias_type
        raise ValueError(
            f"cp_comm_type {kind!r} moves keys around a ring, and a rank has no part of the {what} [b, n, sq, skv] for "
            "them; take 'all_gather' or 'a2a'"
        )


def choose(call: MeshCall, arrays: AttentionArrays, backend: BackendName | None) -> Choice:
    """The backend that runs on each device, and why.

    Raises:
        BackendUnavailableError: if the one asked for by name cannot.
    """
    lacks = _te_lacks(call, arrays)
    for spec in _part_specs(call) if lacks is None else [call.spec]:
        choice = explain_backend("dot_product_attention", attention=spec, backend=backend, ranks=lacks)
        if choice.backend == "xla":
            break
    return choice


def _part_specs(call: MeshCall) -> list[AttentionSpec]:
    call = dataclasses.replace(call, backend="te")
    if call.gathers:
        return gather.part_specs(call)
    if call.ring_ranks > 1:
        return ring.part_specs(call)
    return [call.part(call.spec.q_length, call.spec.kv_length)]


def _te_lacks(call: MeshCall, arrays: AttentionArrays) -> str | None:
    """Why parts that cuDNN has kernels for do not make up the call, or None."""
    spec, kind = call.spec, call.cp.cp_comm_type
    if call.ring_ranks > 1 and (not ring.is_structured(call) or spec.bias_type != "no_bias"):
        return (
            f"cp_comm_type {kind!r} sees all, half or none of another rank's keys, which goes with mask types 'causal' "
            f"and 'no_mask', without windows, lengths, packed sequences and biases ({spec.mask_type!r} here); "
            "'all_gather' and 'a2a' have more"
        )
    if not call.gathers:
        return None
    if spec.bias_type != "no_bias":
        return "cp_comm_type 'all_gather' has no bias; 'a2a' has"
    if not spec.is_causal and spec.window != (-1, -1):
        return "cp_comm_type 'all_gather' has windows under causal masks only; 'a2a' has them all"
    same = arrays.q_lengths is arrays.kv_lengths and (arrays.segments is None or _same(arrays))
    if spec.is_causal and spec.is_padding and not spec.is_bottom_right and not same:
        return (
            "cp_comm_type 'all_gather' aligns queries and keys at the end of each sequence; where their lengths may "
            "differ 'a2a' keeps them aligned at its beginning"
        )
    if spec.is_causal and not spec.is_padding and spec.q_length > spec.kv_length:
        return "cp_comm_type 'all_gather' has causal masks with no more queries than keys; 'a2a' has others"
    return None


def _same(arrays: AttentionArrays) -> bool:
    s = arrays.segments
    return s is not None and s.q_lengths is s.kv_lengths and s.q_offsets is s.kv_offsets
