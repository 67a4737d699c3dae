"""Code that runs on each device of a mesh, on that device's shard of every array, with its collectives written out.

`jax_te.sharding.constrain` leaves collectives to the compiler. Here they are explicit: FP8 values are all-gathered as
FP8, sums are reduce-scattered where a shard is enough, and kernels that the compiler cannot partition (Transformer
Engine's custom calls, Pallas kernels) see one device's arrays.
"""

from __future__ import annotations

import functools
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
            leaves = [jnp.expand_dims(leaf, 0) for leaf in leaves]
        return OpaqueTree(leaves=tuple(leaves), treedef=treedef, per_device=per_device)

    def unpack(self) -> Any:
        """Return the tree; of a ``per_device`` one, inside of ``shard_map``, this device's."""
        leaves = [leaf[0] for leaf in self.leaves] if self.per_device else self.leaves
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
    return tuple(axis for axes in dims for axis in axes)


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
        scattered = flat(scatter)
        axes = tuple(axis for axis in axes if axis not in scattered)
    return jax.lax.psum(x, axes) if axes else x


def reduce_max(x: Array, axes: MeshAxes) -> Array:
    """Return the maximum of a device's ``x`` over mesh axes."""
    return jax.lax.pmax(x, axes) if axes else x


# Being replaced: ops that have not moved to sharded_vjp yet use these.
@dataclass(frozen=True)
class Layout:
    """How one array is split: the mesh axes of each of its dimensions, the outermost first.

    >>> tuple(Layout((("data", "fsdp"), (), ("tensor",))).spec)
    (('data', 'fsdp'), None, 'tensor')
    """

    dims: tuple[MeshAxes, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """The same for JAX."""
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in self.dims))

    @property
    def axes(self) -> MeshAxes:
        """All mesh axes that split the array."""
        return tuple(axis for axes in self.dims for axis in axes)

    def local_shape(self, shape: tuple[int, ...], mesh: AbstractMesh) -> tuple[int, ...] | None:
        """Shape of one device's part; None if the array does not divide."""
        sizes = [prod(mesh.shape[axis] for axis in axes) for axes in self.dims]
        if any(size % parts for size, parts in zip(shape, sizes, strict=True)):
            return None
        return tuple(size // parts for size, parts in zip(shape, sizes, strict=True))


class _PerRank:
    def __repr__(self) -> str:
        return "PER_RANK"


PER_RANK = _PerRank()
"""In place of a `Layout`: a tree that means something to the device only that made it, handed from one call of
`on_ranks` to another as a `RankTree`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RankTree:
    """A tree that every device has its own of: ``leaves`` with a leading dimension, one entry for each device."""

    leaves: tuple[Any, ...]
    treedef: Any = field(metadata={"static": True})


WHOLE = Layout()
"""Every device has all of it."""


def rank_mesh() -> AbstractMesh | None:
    """The mesh in use, if it has several devices and no axis that a surrounding ``shard_map`` has taken; else None.

    >>> rank_mesh()
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def layout_of(axes: LogicalAxes, mesh: AbstractMesh) -> Layout:
    """The layout that an array's logical axes stand for."""
    spec = logical_to_spec(axes, mesh)
    return Layout(tuple(() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec))


def place(tree: Any, layout: Layout, mesh: AbstractMesh) -> Any:
    """Arrays split so, where shardings are part of types; `on_ranks` does it elsewhere. Differentiable."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda x: jax.sharding.reshard(x, layout.spec), tree)


def on_ranks(
    fn: Callable[..., Any], static: Any, mesh: AbstractMesh, in_layouts: tuple[Any, ...], out_layouts: Any, args: Any
) -> Any:
    """``fn(static, *args)`` on every device's parts of the arguments. For the rules of a custom_vjp: nothing
    differentiates it.

    Args:
        fn: a function of this module's caller, the same object at each call.
        static: hashable.
        mesh: of `rank_mesh`.
        in_layouts: for each argument a `Layout`, `PER_RANK`, or a tuple tree of them down to subtrees of the argument.
        out_layouts: likewise for the result.
        args: trees of arrays.
    """
    return _on_ranks(fn, static, mesh, in_layouts, out_layouts, args)


# Under a jit of its own for calls that no jit surrounds.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _on_ranks(fn: Any, static: Any, mesh: AbstractMesh, in_layouts: Any, out_layouts: Any, args: Any) -> Any:
    everywhere = PartitionSpec(mesh.axis_names)

    def spec(layout: Any) -> PartitionSpec:
        return everywhere if layout is PER_RANK else layout.spec

    def local(*args: Any) -> Any:
        result = fn(static, *jax.tree.map(_enter, in_layouts, args))
        return jax.tree.map(_leave, out_layouts, result)

    if AxisType.Explicit in mesh.axis_types:
        args = jax.tree.map(
            lambda layout, tree: jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec(layout)), tree),
            in_layouts,
            args,
        )
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=jax.tree.map(spec, in_layouts),
        out_specs=jax.tree.map(spec, out_layouts),
        check_vma=False,
    )
    return split(*args)


def _enter(layout: Any, tree: Any) -> Any:
    if layout is not PER_RANK:
        return tree
    return jax.tree.unflatten(tree.treedef, [leaf[0] for leaf in tree.leaves])


def _leave(layout: Any, tree: Any) -> Any:
    if layout is not PER_RANK:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return RankTree(tuple(jnp.expand_dims(leaf, 0) for leaf in leaves), treedef)


gather = all_gather
