"""Code that runs on each device of a mesh, on the device's shards of arrays, with explicit collectives.

`jax_te.sharding.constrain` leaves collectives to the compiler. Here they are explicit: FP8 values are all-gathered as
FP8, sums are reduce-scattered where a shard suffices, and kernels that the compiler cannot partition (Transformer
Engine's custom calls, Pallas kernels) receive one device's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_te.sharding.rules import Dims, MeshAxes, current_mesh, flat, free_axes
from jax_te.typing import Array

REPLICATED = PartitionSpec()
"""Every device holds the whole array."""


def device_mesh() -> AbstractMesh | None:
    """Return the mesh in use, if it has several devices and axes that no ``shard_map`` has taken; else None.

    >>> device_mesh()
    """
    mesh = current_mesh()
    # Next to manual axes, axes of size 1 count, too: TE's kernels have their own partitioning, and if only some axes
    # are manual, JAX cannot read the shardings with which XLA calls it.
    return None if mesh is None or mesh.size == 1 or not free_axes(mesh) else mesh


def reshard(tree: Any, specs: Any, mesh: AbstractMesh) -> Any:
    """Return arrays sharded by ``specs``, a tree prefix of PartitionSpecs. Differentiable.

    On Auto axes it is the identity: ``shard_map`` moves the arrays, and only Explicit axes make shardings part of
    types.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return tree

    def move(spec: PartitionSpec, subtree: Any) -> Any:
        return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), subtree)

    return jax.tree.map(move, specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


def all_gather(x: Array, dims: Dims) -> Array:
    """Return a device's shard all-gathered along the mesh axes that are named for each dimension."""

    def gather(x: Array) -> Array:
        for dim, axes in enumerate(dims):
            if axes:
                x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    return moved(x, gather)


def all_to_all(x: Array, axes: MeshAxes) -> Array:
    """Return the parts ``[n, ...]`` that ``n`` devices along mesh axes send to this one, of those that it sends."""
    return moved(x, lambda sent: jax.lax.all_to_all(sent, axes, 0, 0, tiled=True))


def moved(x: Array, move: Callable[[Array], Array]) -> Array:
    """Return ``move(x)`` of a collective that moves values and computes nothing: FP8 values are moved as bytes."""
    # Not every XLA backend has collectives of 8-bit floats; moving values needs their bytes only.
    is_fp8 = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    if not is_fp8:
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def reduce_sum(x: Array, axes: MeshAxes, scatter: Dims = (), later: MeshAxes = ()) -> Array:
    """Return a device's ``x`` summed over mesh axes: all-reduced, and reduce-scattered along ``scatter``.

    Args:
        x: array of one device.
        axes: mesh axes to sum over.
        scatter: mesh axes, among ``axes``, along which each device keeps its shard of the sum alone, for each
            dimension.
        later: mesh axes over which the caller sums up afterwards: the result has an axis in front, for one summand of
            each of their devices.
    """
    for dim, names in enumerate(scatter):
        if names:
            x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    summed = tuple([axis for axis in axes if axis not in (*flat(scatter), *later)])
    x = jax.lax.psum(x, summed) if summed else x
    if not later:
        return x
    # Devices that computed the same summand must count once.
    same = tuple([axis for axis in later if axis not in axes])
    x = jnp.where(jax.lax.axis_index(same) == 0, x, jnp.zeros_like(x)) if same else x
    return x[None]


def reduce_max(x: Array, axes: MeshAxes) -> Array:
    """Return the maximum of a device's ``x``, of a dtype of up to 32 bits, over mesh axes; nan if any device's is.

    The maximum is exchanged as int32, since one of floats loses nan on the way (as XLA's on CPU), and an amax must not:
    see `jax_te.quantize.amax`, which computes one device's in the same way.
    """
    if not axes:
        return x
    largest = jax.lax.pmax(_ordered_bits(x.astype(jnp.float32)), axes)
    return jax.lax.bitcast_convert_type(_flipped_if_negative(largest), jnp.float32).astype(x.dtype)


def _ordered_bits(x: Array) -> Array:
    """Return int32 in the order of the fp32 values, with nan, of either sign, above inf."""
    bits = _flipped_if_negative(jax.lax.bitcast_convert_type(x, jnp.int32))
    return jnp.where(jnp.isnan(x), jnp.abs(bits), bits)


def _flipped_if_negative(bits: Array) -> Array:
    """Return bit patterns of fp32 as int32 in the values' order, or such integers as bit patterns."""
    # The pattern of a negative value grows with its magnitude.
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the manual mesh axes along which the arrays of a tree may differ, as JAX knows it.

    Empty outside of a ``shard_map``, and inside of one with ``check_vma=False``.

    >>> varying_axes({"x": jnp.ones(2)})
    frozenset()
    """
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)))


def mark_varying(arrays: Any, axes: Iterable[str]) -> Any:
    """Return a tree of arrays of which JAX knows that they may differ along these manual mesh axes.

    For what an inner ``shard_map`` without the check has lost the marks of. Its derivative is JAX's, a sum over the
    devices: use it inside of derivative rules only.

    >>> mark_varying(jnp.ones(2), ()).tolist()
    [1.0, 1.0]
    """
    wanted = frozenset(axes)

    def mark(leaf: jax.Array) -> jax.Array:
        more = tuple(sorted(wanted - varying_axes(leaf)))
        return jax.lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(mark, arrays) if wanted else arrays
