"""Static sharding of an attention call over a mesh."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jax_te._validation import check_annotations, check_choice
from jax_te.config import CP_COMM_TYPES
from jax_te.ops.attention.spec import AttentionSpec, MaskType
from jax_te.sharding import MeshAxes, ShardingRules, free_axes, mesh_dims
from jax_te.typing import LogicalAxes


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How devices that shard a sequence exchange keys and values.

    Args:
        cp_comm_type: ``"p2p"``: keys and values travel around a ring (Liu et al. 2023); ``"all_gather"``: every device
            all-gathers them; ``"a2a"``: devices exchange shards of the sequence for heads (Ulysses, Jacobs et al.
            2023); ``"a2a+p2p"``: Ulysses in groups of neighbours, a ring of groups (Fang and Zhao 2024).
        hierarchical_context_parallel_sizes: number of neighbouring devices that exchange heads, and number of such
            groups in a ring. Read, and then needed, by ``"a2a+p2p"`` on a mesh whose context axis is larger than 1.
        cp_load_balanced: whether sequences are in zig-zag order, see `zigzag_positions`.

    Raises:
        ValueError: for an unknown type, or sizes that are not two positive integers.
        TypeError: for a flag that is not True or False.

    >>> ContextParallel(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 4)).cp_load_balanced
    False
    """

    cp_comm_type: str = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    cp_load_balanced: bool = False

    def __post_init__(self) -> None:
        check_choice(CP_COMM_TYPES, cp_comm_type=self.cp_comm_type)
        sizes = self.hierarchical_context_parallel_sizes
        # bool is a subclass of int: True would pass as 1.
        numbers = tuple(sizes) if isinstance(sizes, list | tuple) else ()
        if sizes is not None and (len(numbers) != 2 or not all(type(size) is int and size >= 1 for size in numbers)):
            raise ValueError(
                f"hierarchical_context_parallel_sizes must be (a2a ranks, p2p ranks), two integers >= 1, got {sizes!r}"
            )
        object.__setattr__(self, "hierarchical_context_parallel_sizes", numbers or None)
        check_annotations(self, ContextParallel)


@dataclass(frozen=True, kw_only=True)
class AttentionSharding:
    """An attention call sharded over a mesh. Hashable: its rules are traced once for each.

    Args:
        spec: the whole call, as if it ran on one device.
        mesh: the mesh in use.
        axis_names: mesh axes that no surrounding ``shard_map`` has made manual.
        batch, context, heads: mesh axes larger than 1 that shard examples, sequence and heads.
        batch_shards, context_shards, head_shards: numbers of shards along these axes.
        cp: exchange of keys and values between devices.
        gathers: whether every device all-gathers keys and values.
        ulysses_size: number of neighbours that exchange shards of the sequence for heads; 1: no exchange.
        ring_size: number of devices, or groups of such neighbours, in a ring; 1: no ring.
        load_balanced: whether sequences are in zig-zag order.
        backend: backend that runs on each device.
    """

    spec: AttentionSpec
    mesh: AbstractMesh
    axis_names: MeshAxes
    batch: MeshAxes
    context: MeshAxes
    heads: MeshAxes
    batch_shards: int
    context_shards: int
    head_shards: int
    cp: ContextParallel
    gathers: bool
    ulysses_size: int
    ring_size: int
    load_balanced: bool
    backend: str = "xla"

    def shard_spec(
        self, q_length: int, kv_length: int, mask_type: MaskType | None = None, **changes: Any
    ) -> AttentionSpec:
        """Return the spec of one block of a device: some of its queries and some keys.

        Args:
            q_length, kv_length: numbers of queries and keys.
            mask_type: None: the whole call's.
            **changes: fields that differ from the whole call's.
        """
        spec, heads = self.spec, self.head_shards * self.ulysses_size
        if mask_type == "no_mask" and spec.is_causal:
            changes["window"] = (-1, -1)  # or the causal mask, which is a window that ends at the query, would stay
        shape = spec.bias_shape
        if shape is not None and spec.bias_type != "alibi":
            sizes = (spec.batch // self.batch_shards, spec.heads // heads, q_length, kv_length)
            changes["bias_shape"] = tuple(1 if size == 1 else local for size, local in zip(shape, sizes, strict=True))
        return dataclasses.replace(
            spec,
            batch=spec.batch // self.batch_shards,
            q_length=q_length,
            kv_length=kv_length,
            heads=spec.heads // heads,
            groups=spec.groups // heads,
            mask_type=spec.mask_type if mask_type is None else mask_type,
            packed=spec.packed and not self.context,  # context parallelism moves keys and values, not queries
            **changes,
        )


def attention_sharding(
    spec: AttentionSpec, axes: LogicalAxes, mesh: AbstractMesh, rules: ShardingRules, cp: ContextParallel
) -> AttentionSharding | None:
    """Return the sharding over ``mesh`` under ``rules`` of a call whose result has logical axes ``axes``.

    The result is None if a surrounding ``shard_map`` has made all axes larger than 1 manual, and if head sizes are
    sharded.
    """
    free = free_axes(mesh)
    if len(axes) != 4 or all(mesh.shape[name] == 1 for name in free):
        return None
    batch, context, heads, head_dim = dims = mesh_dims(axes, mesh, rules)
    # Scores contract the head size: sharded, every block would need an all-reduce, which the compiler can place.
    if head_dim:
        return None
    if spec.is_bottom_right and not spec.is_padding and spec.q_length == spec.kv_length:
        # The same mask, under a name for which the ring and cuDNN support more cases.
        spec = dataclasses.replace(spec, mask_type="causal")
    batch_shards, context_shards, head_shards = [prod([mesh.shape[name] for name in dim]) for dim in dims[:3]]
    gathers = cp.cp_comm_type == "all_gather" and context_shards > 1
    sizes = cp.hierarchical_context_parallel_sizes
    ulysses_size = {"a2a": context_shards, "a2a+p2p": sizes[0] if sizes and context else 1}.get(cp.cp_comm_type, 1)
    return AttentionSharding(
        spec=spec,
        mesh=mesh,
        axis_names=free,
        batch=batch,
        context=context,
        heads=heads,
        batch_shards=batch_shards,
        context_shards=context_shards,
        head_shards=head_shards,
        cp=cp,
        gathers=gathers,
        ulysses_size=ulysses_size,
        ring_size=1 if gathers else context_shards // ulysses_size,
        load_balanced=cp.cp_load_balanced and context_shards > 1,
    )


def shard_positions(sharding: AttentionSharding, index: Any, total: int) -> Any:
    """Return the positions, int32 ``[s]``, of shard ``index`` of a sequence of ``total``.

    A shard belongs to one device, or to a group of neighbours that have exchanged sequence for heads.
    """
    shards = sharding.context_shards // sharding.ulysses_size
    size = total // shards
    steps = jnp.arange(size, dtype=np.int32)
    if not sharding.load_balanced:
        return index * size + steps
    # Zig-zag order: the first half are chunk ``index`` from the beginning, the second chunk ``index`` from the end.
    half = size // 2
    return jnp.where(steps < half, index * half + steps, (2 * shards - 2 - index) * half + steps)
