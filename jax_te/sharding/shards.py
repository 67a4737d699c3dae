"""Code that runs on each device of a mesh, on that device's shard of every array, with its collectives written out.

`jax_te.sharding.constrain` leaves collectives to the compiler. Here they are explicit: FP8 values are all-gathered as
FP8, sums are reduce-scattered where a shard is enough, and kernels that the compiler cannot partition (Transformer
Engine's custom calls, Pallas kernels) see one device's arrays.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_te.sharding.rules import MeshAxes, current_mesh, logical_to_spec
from jax_te.typing import Array, LogicalAxes

Dims = tuple[MeshAxes, ...]
"""How an array is sharded: the mesh axes of each of its dimensions, the outermost first; ``()``: not along this one."""

REPLICATED = PartitionSpec()
"""Every device holds the whole array."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OpaqueTree:
    """The arrays of a tree whose own classes must not pass through JAX's transformations.

    Args:
        leaves: the arrays; with ``per_device`` each has a leading dimension with one entry for each device.
        treedef: their structure.
        per_device: every device of a mesh has a tree of its own, which no other device reads.
    """

    leaves: tuple[Any, ...]
    treedef: Any = field(metadata={"static": True})
    per_device: bool = field(default=False, metadata={"static": True})

    @staticmethod
    def pack(tree: Any, *, per_device: bool = False) -> OpaqueTree:
        """Return ``tree`` as its arrays; ``per_device`` inside of ``shard_map``: this device's entry."""
        leaves, treedef = jax.tree.flatten(tree)
        if per_device:
            # shard_map concatenates results along an axis they have: scalars and replicated arrays need a new one.
            leaves = map(functools.partial(jnp.expand_dims, axis=0), leaves)
        return OpaqueTree(leaves=tuple(leaves), treedef=treedef, per_device=per_device)

    def unpack(self) -> Any:
        """Return the tree; of a ``per_device`` one, inside of ``shard_map``, this device's."""
        leaves = map(operator.itemgetter(0), self.leaves) if self.per_device else self.leaves
        return jax.tree.unflatten(self.treedef, leaves)


def device_mesh() -> AbstractMesh | None:
    """Return the mesh in use, if it has several devices and no axis that a surrounding ``shard_map`` took; else None.

    >>> device_mesh()
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def mesh_dims(axes: LogicalAxes, mesh: AbstractMesh) -> Dims:
    """Return the mesh axes that shard each dimension of an array with these logical axes.

    >>> mesh_dims(("batch", None, "ffn"), AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")))
    (('data', 'fsdp'), (), ('tensor',))
    """
    spec = logical_to_spec(axes, mesh)
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec)


def partition_spec(dims: Dims) -> PartitionSpec:
    """Return JAX's form of `Dims`.

    >>> tuple(partition_spec((("data", "fsdp"), (), ("tensor",))))
    (('data', 'fsdp'), None, 'tensor')
    """
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in dims))


def local_shape(shape: tuple[int, ...], dims: Dims, mesh: AbstractMesh) -> tuple[int, ...] | None:
    """Return the shape of one device's shard; None if the array does not divide.

    >>> local_shape((8, 6), (("data",), ("tensor",)), AbstractMesh((2, 4), ("data", "tensor"))) is None
    True
    """
    sizes = [prod(mesh.shape[axis] for axis in axes) for axes in dims]
    if any(size % shards for size, shards in zip(shape, sizes, strict=True)):
        return None
    return tuple(size // shards for size, shards in zip(shape, sizes, strict=True))


def flat(dims: Dims) -> MeshAxes:
    """Return all mesh axes of ``dims`` in one tuple.

    >>> flat((("data", "fsdp"), (), ("tensor",)))
    ('data', 'fsdp', 'tensor')
    """
    return sum(dims, ())


def reshard(tree: Any, specs: Any, mesh: AbstractMesh) -> Any:
    """Return arrays sharded by ``specs``, a tree prefix of PartitionSpecs. Differentiable.

    On Auto axes nothing is done: ``shard_map`` moves the arrays, and only Explicit axes make shardings part of types.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return tree

    def move(spec: PartitionSpec, subtree: Any) -> Any:
        return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), subtree)

    return jax.tree.map(move, specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


def all_gather(x: Array, dims: Dims) -> Array:
    """Return a device's shard all-gathered along the mesh axes that are named for each dimension."""
    for dim, axes in enumerate(dims):
        if axes:
            x = _as_bytes(functools.partial(jax.lax.all_gather, axis_name=axes, axis=dim, tiled=True), x)
    return x


def _as_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    # Not every XLA backend has collectives of 8-bit floats; moving values needs their bytes only.
    if x.dtype.itemsize > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        return collective(x)
    return jax.lax.bitcast_convert_type(collective(jax.lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def reduce_sum(x: Array, axes: MeshAxes, scatter: Dims = ()) -> Array:
    """Return a device's ``x`` summed over mesh axes: all-reduced, and reduce-scattered along ``scatter``.

    Args:
        x: array of one device.
        axes: mesh axes to sum over.
        scatter: for each dimension those of ``axes`` along which each device keeps its shard of the sum alone.
    """
    if scatter:
        for dim, names in enumerate(scatter):
            if names:
                x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
        axes = tuple([axis for axis in axes if axis not in flat(scatter)])
    return jax.lax.psum(x, axes) if axes else x


def reduce_max(x: Array, axes: MeshAxes) -> Array:
    """Return the maximum of a device's ``x`` over mesh axes."""
    return jax.lax.pmax(x, axes) if axes else x
