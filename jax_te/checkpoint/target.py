"""Target of a restore: the name, shape, dtype and sharding of each array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_te.checkpoint.tree import Name, named_leaves
from jax_te.sharding import check_divides, leaves_with_axes, named_sharding
from jax_te.typing import LogicalAxes, PyTree


def described(tree: PyTree) -> dict[Name, jax.ShapeDtypeStruct]:
    """Return shape, dtype and the sharding to restore to of each leaf, in leaf order.

    A leaf that has a sharding on devices keeps it. Others (those of ``jax.eval_shape``, NumPy arrays) are sharded by
    the logical axes of their Variable on the mesh in use, or replicated without axes. Without a mesh they go to the
    default device.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes.

    >>> described({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})[("a",)].shape
    (2,)
    """
    mesh = jax.sharding.get_mesh()
    placed = zip(named_leaves(tree).items(), leaves_with_axes(tree), strict=True)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding("/".join(name), leaf, axes, mesh))
        for (name, leaf), (_, _, axes) in placed
    }


def _sharding(name: str, leaf: Any, axes: LogicalAxes | PartitionSpec, mesh: Mesh) -> Sharding:
    given = getattr(leaf, "sharding", None)
    # The sharding of a shape traced under a mesh names axes, but no devices.
    traced = given if isinstance(given, NamedSharding) and isinstance(given.mesh, AbstractMesh) else None
    if given is not None and traced is None:
        return given
    if mesh.empty:
        return jnp.zeros(()).sharding
    # A shape's spec never contains axes of type Auto, so an empty one carries no information.
    if traced is not None and any(traced.spec):
        return NamedSharding(mesh, traced.spec)
    check_divides(name, leaf.shape, axes, mesh)
    return named_sharding(axes, mesh)
