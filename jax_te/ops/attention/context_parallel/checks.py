"""Check that a sharded attention call can run, and choose the backend that runs on each device."""

from __future__ import annotations

import dataclasses

from jax_te.ops.attention.context_parallel import all_gather, ring
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.fp8_support import fp8_attention_lacks
from jax_te.ops.attention.spec import AttentionSpec
from jax_te.ops.backend import BackendChoice, explain_backend
from jax_te.quantize import AttentionPrecision
from jax_te.typing import BackendName


def check_sharding(sharding: AttentionSharding, has_mask: bool) -> None:
    """Raise ValueError for sizes that do not divide over the mesh, and for arrays that the exchange cannot shard."""
    spec, context, tensor = sharding.spec, sharding.context_shards, sharding.head_shards
    chunks = context * (2 if sharding.load_balanced else 1)
    for name, size, shards, axes in (
        ("queries", spec.q_length, chunks, sharding.context),
        ("keys", spec.kv_length, chunks, sharding.context),
        ("examples", spec.batch, sharding.batch_shards, sharding.batch),
        ("query heads", spec.heads, tensor, sharding.heads),
        ("key/value heads (groups)", spec.groups, tensor, sharding.heads),
    ):
        if size % shards:
            twice = ", twice as many in zig-zag order" if sharding.load_balanced and axes == sharding.context else ""
            over = shards // 2 if twice else shards
            raise ValueError(
                f"attention on a mesh: {size} {name} do not divide over mesh axes {'*'.join(axes)} = {over}{twice}; "
                "pad them or change the mesh"
            )
    kind, sizes = sharding.cp.cp_comm_type, sharding.cp.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p" and context > 1 and (sizes is None or sizes[0] * sizes[1] != context):
        raise ValueError(
            "cp_comm_type 'a2a+p2p' needs hierarchical_context_parallel_sizes=(a2a ranks, p2p ranks) with a product of "
            f"{context}, the size of the mesh's context axis; got {sizes}"
        )
    exchange = sharding.ulysses_size
    if (spec.heads // tensor) % exchange or (spec.groups // tensor) % exchange:
        raise ValueError(
            f"cp_comm_type {kind!r} exchanges heads among {exchange} devices, but on each there are "
            f"{spec.heads // tensor} query and {spec.groups // tensor} key/value heads, which do not divide; take "
            "'p2p', 'all_gather', or 'a2a+p2p' with fewer a2a ranks"
        )
    if sharding.ring_size > 1 and (has_mask or spec.bias_type in ("pre_scale_bias", "post_scale_bias")):
        what = "mask" if has_mask else spec.bias_type
        raise ValueError(
            f"cp_comm_type {kind!r} moves keys around a ring, and a device has no shard of the {what} [b, n, sq, skv] "
            "for them; take 'all_gather' or 'a2a'"
        )


def fp8_exchange_lacks(sharding: AttentionSharding) -> str | None:
    """Return the reason why a call cannot be composed of blocks that FP8 attention has, or None.

    The rule is that of cuDNN's kernels, on every device and backend, as for one device's calls.
    """
    if sharding.ring_size == 1:
        return None
    kind = sharding.cp.cp_comm_type
    if not ring.is_structured(sharding):
        return (
            f"cp_comm_type {kind!r} with a causal mask of {sharding.spec.q_length} queries and "
            f"{sharding.spec.kv_length} keys, and FP8 attention has rings of equal lengths; 'all_gather' and 'a2a' "
            "have others"
        )
    for spec in ring.block_specs(sharding):
        if reason := fp8_attention_lacks(spec):
            return f"cp_comm_type {kind!r}, of which one block has {reason}; 'all_gather' and 'a2a' have no such blocks"
    return None


def fp8_kernels_lack(sharding: AttentionSharding, precision: AttentionPrecision) -> str | None:
    """Return the reason why FP8 kernels cannot run on each device of a mesh, or None."""
    if not sharding.context:
        return None
    if sharding.gathers and sharding.spec.is_causal:
        return (
            "cp_comm_type 'all_gather' has a causal mask of some queries and all keys, and FP8 kernels have none; "
            "'p2p' and 'a2a' give them whole blocks"
        )
    if sharding.gathers:
        queries, keys = sharding.spec.q_length // sharding.context_shards, sharding.spec.kv_length
        if reason := fp8_attention_lacks(sharding.shard_spec(queries, keys)):
            return f"cp_comm_type 'all_gather' gives each device {reason}"
    if precision.unquantized_pass is None:
        return None
    choice = choose_backend(sharding, same_lengths=True, backend="auto")
    if choice.backend == "te":
        return None
    return f"{precision.unquantized_pass}=False takes TE's kernel for that pass: {choice.reason}"


def choose_backend(sharding: AttentionSharding, same_lengths: bool, backend: BackendName | None) -> BackendChoice:
    """Return the backend that runs on each device, and why.

    Raises:
        BackendUnavailableError: if ``backend`` was named and cannot run the call.
    """
    reason = _te_lacks(sharding, same_lengths)
    # TE runs the call only if it has a kernel for every block: a device computes several, of different sizes and masks.
    specs = _block_specs(sharding) if reason is None else [sharding.spec]
    choices = [
        explain_backend("dot_product_attention", attention=spec, backend=backend, unsharded=reason) for spec in specs
    ]
    return next((choice for choice in choices if choice.backend == "xla"), choices[-1])


def _block_specs(sharding: AttentionSharding) -> list[AttentionSpec]:
    sharding = dataclasses.replace(sharding, backend="te")
    if sharding.gathers:
        return all_gather.block_specs(sharding)
    if sharding.ring_size > 1:
        return ring.block_specs(sharding)
    return [sharding.shard_spec(sharding.spec.q_length, sharding.spec.kv_length)]


def _te_lacks(sharding: AttentionSharding, same_lengths: bool) -> str | None:
    """Return the reason why the call cannot be composed of blocks that cuDNN supports, or None."""
    spec, kind = sharding.spec, sharding.cp.cp_comm_type
    if sharding.ring_size > 1 and (not ring.is_structured(sharding) or spec.bias_type != "no_bias"):
        return (
            f"cp_comm_type {kind!r} sees all, half or none of another device's keys, which goes with mask types "
            f"'causal' and 'no_mask', without windows, lengths, packed sequences and biases ({spec.mask_type!r} here); "
            "'all_gather' and 'a2a' have more"
        )
    if not sharding.gathers:
        return None
    if spec.bias_type != "no_bias":
        return "cp_comm_type 'all_gather' has no bias; 'a2a' has"
    if not spec.is_causal and spec.window != (-1, -1):
        return "cp_comm_type 'all_gather' has windows under causal masks only; 'a2a' has them all"
    if spec.is_causal and spec.is_padding and not spec.is_bottom_right and not same_lengths:
        return (
            "cp_comm_type 'all_gather' aligns queries and keys at the end of each sequence; where their lengths may "
            "differ 'a2a' keeps them aligned at its beginning"
        )
    if spec.is_causal and not spec.is_padding and spec.q_length > spec.kv_length:
        # The first devices' queries would attend to no key, and cuDNN does not accept calls without keys.
        return "cp_comm_type 'all_gather' has causal masks with no more queries than keys; 'a2a' has others"
    return None
