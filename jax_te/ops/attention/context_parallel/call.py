"""What is known, before it runs, of an attention call on a mesh."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jax_te.config import CP_COMM_TYPES
from jax_te.ops.attention.spec import AttentionSpec, MaskType
from jax_te.sharding import logical_to_spec
from jax_te.typing import LogicalAxes

MeshAxes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How the ranks of a mesh's context axis exchange what attention needs of one another.

    Args:
        cp_comm_type: ``"p2p"``: keys and values travel around a ring (Liu et al. 2023); ``"all_gather"``: every rank
            gathers them; ``"a2a"``: ranks exchange parts of the sequence for heads (Jacobs et al. 2023); ``"a2a+p2p"``:
            both, in groups (Fang and Zhao 2024).
        hierarchical_context_parallel_sizes: how many neighbouring ranks exchange heads, and how many such groups are on
            a ring. Read, and then needed, by ``"a2a+p2p"`` on a mesh with several context ranks.
        cp_load_balanced: sequences are in zig-zag order, see `zigzag_positions`.

    Raises:
        ValueError: for an unknown type, or sizes that are not two positive integers.

    >>> ContextParallel(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 4)).cp_load_balanced
    False
    """

    cp_comm_type: str = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    cp_load_balanced: bool = False

    def __post_init__(self) -> None:
        if self.cp_comm_type not in CP_COMM_TYPES:
            raise ValueError(f"cp_comm_type must be one of {', '.join(CP_COMM_TYPES)}, got {self.cp_comm_type!r}")
        sizes = self.hierarchical_context_parallel_sizes
        if sizes is None:
            return
        object.__setattr__(self, "hierarchical_context_parallel_sizes", tuple(sizes))
        if len(sizes) != 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError(
                f"hierarchical_context_parallel_sizes must be (a2a ranks, p2p ranks), two integers >= 1, got {sizes!r}"
            )


@dataclass(frozen=True, kw_only=True)
class MeshCall:
    """An attention call on a mesh. Hashable: one shard_map is traced for each.

    Args:
        spec: the whole call, as if it ran on one device.
        batch, context, heads: mesh axes of more than one rank that split examples, sequence and heads.
        everywhere: all mesh axes that no surrounding ``shard_map`` has taken.
        sizes: of the mesh's axes.
        cp: how the context ranks exchange.
        backend: what runs on each device.
    """

    spec: AttentionSpec
    batch: MeshAxes
    context: MeshAxes
    heads: MeshAxes
    everywhere: MeshAxes
    sizes: tuple[tuple[str, int], ...]
    cp: ContextParallel
    backend: str = "xla"

    def ranks(self, axes: MeshAxes) -> int:
        """How many parts some mesh axes make."""
        return math.prod(size for name, size in self.sizes if name in axes)

    @property
    def context_ranks(self) -> int:
        """``C``."""
        return self.ranks(self.context)

    @property
    def exchange_ranks(self) -> int:
        """Neighbouring context ranks that exchange parts of the sequence for heads; 1: none do."""
        if not self.context:
            return 1
        sizes = self.cp.hierarchical_context_parallel_sizes
        return {"a2a": self.context_ranks, "a2a+p2p": sizes[0] if sizes else 1}.get(self.cp.cp_comm_type, 1)

    @property
    def ring_ranks(self) -> int:
        """Groups of ranks among which keys and values travel; 1: they do not."""
        return 1 if self.gathers else self.context_ranks // self.exchange_ranks

    @property
    def gathers(self) -> bool:
        """Whether every rank gathers keys and values."""
        return self.cp.cp_comm_type == "all_gather" and self.context_ranks > 1

    @property
    def load_balanced(self) -> bool:
        """Whether sequences are in zig-zag order."""
        return self.cp.cp_load_balanced and self.context_ranks > 1

    @property
    def context_name(self) -> Any:
        """The context axes as collectives take them."""
        return self.context[0] if len(self.context) == 1 else self.context

    def part(self, q_length: int, kv_length: int, mask_type: MaskType | None = None, **changes: Any) -> AttentionSpec:
        """Description of what one device computes at a time: some of its queries and some keys.

        Args:
            q_length, kv_length: how many.
            mask_type: None: the whole call's.
            **changes: other fields than the whole call's.
        """
        spec = self.spec
        parts = self.ranks(self.heads) * self.exchange_ranks
        if mask_type == "no_mask" and spec.is_causal:
            changes["window"] = (-1, -1)
        shape = spec.bias_shape
        if shape is not None and spec.bias_type != "alibi":
            wanted = (spec.batch // self.ranks(self.batch), spec.heads // parts, q_length, kv_length)
            changes["bias_shape"] = tuple(1 if size == 1 else local for size, local in zip(shape, wanted, strict=True))
        return dataclasses.replace(
            spec,
            batch=spec.batch // self.ranks(self.batch),
            q_length=q_length,
            kv_length=kv_length,
            heads=spec.heads // parts,
            groups=spec.groups // parts,
            mask_type=spec.mask_type if mask_type is None else mask_type,
            packed=spec.packed and not self.context,
            **changes,
        )


def mesh_call(spec: AttentionSpec, axes: LogicalAxes, mesh: AbstractMesh, cp: ContextParallel) -> MeshCall | None:
    """The call on ``mesh``, whose result has logical axes ``axes``; None where a surrounding ``shard_map`` has taken
    all axes of more than one rank, and where the size of heads is split.
    """
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = tuple(name for name, kind in types if kind != AxisType.Manual)

    def names(entry: Any) -> MeshAxes:
        entry = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in entry if name in free and mesh.shape[name] > 1)

    if len(axes) != 4 or all(mesh.shape[name] == 1 for name in free):
        return None
    batch, context, heads, channels = (names(entry) for entry in logical_to_spec(axes, mesh))
    if channels:
        return None
    if spec.is_bottom_right and not spec.is_padding and spec.q_length == spec.kv_length:
        spec = dataclasses.replace(spec, mask_type="causal")  # the same, and more can run it
    return MeshCall(
        spec=spec,
        batch=batch,
        context=context,
        heads=heads,
        everywhere=free,
        sizes=tuple(mesh.shape.items()),
        cp=cp,
    )


def rank_positions(call: MeshCall, rank: Any, total: int) -> Any:
    """Places in a whole sequence of ``total`` of what a member of the ring, or a gathering rank, has: int32 ``[s]``."""
    ranks = call.context_ranks // call.exchange_ranks
    size = total // ranks
    steps = jax.numpy.arange(size, dtype=np.int32)
    if not call.load_balanced:
        return rank * size + steps
    half = size // 2
    return jax.numpy.where(steps < half, rank * half + steps, (2 * ranks - 2 - rank) * half + steps)
