"""Where the arrays of a model or a train state belong on a mesh, by the logical axes that their Variables carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_te.sharding.constrain import auto_region, constrain
from jax_te.sharding.rules import current_mesh, logical_to_spec, named_sharding, ranks_of
from jax_te.typing import Array, LogicalAxes, PyTree


def leaves_with_axes(tree: PyTree) -> list[tuple[str, Any, LogicalAxes]]:
    """Return name, leaf and logical axes of every leaf of ``tree``, in the order of ``jax.tree.leaves``.

    The axes are those of the Variable around the leaf, see `variable_axes`; optimizer state that mirrors a parameter
    keeps its Variable.

    >>> leaves_with_axes({"a": nnx.Param(jnp.ones((2, 2)), logical_axes=("fsdp", "ffn")), "b": jnp.ones(2)})[1][::2]
    ('b', (None,))
    """
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        for inside, leaf in jax.tree_util.tree_leaves_with_path(node.get_value() if _is_variable(node) else node):
            name = jax.tree_util.keystr((*path, *inside), simple=True, separator="/")
            found.append((name, leaf, variable_axes(node, leaf) if _is_variable(node) else (None,) * leaf.ndim))
    return found


def variable_axes(variable: Any, leaf: Any) -> LogicalAxes:
    """Return the logical axes of an array of a Variable: those in its metadata, behind None for the axes of a stack.

    None for every dimension where there are none or the array has another shape than the Variable.

    >>> kernel = nnx.Param(jnp.ones((4, 2, 2)), logical_axes=("fsdp", "ffn"))
    >>> variable_axes(kernel, kernel.get_value())
    (None, 'fsdp', 'ffn')
    """
    axes = variable.get_metadata().get("logical_axes")
    # A quantized kernel has the shape of its values; its scales may have as many axes, but other sizes.
    if axes is None or leaf.ndim < len(axes) or leaf.shape != getattr(variable.get_value(), "shape", None):
        return (None,) * leaf.ndim
    # Layers that nnx.vmap stacked have one axis more than each of them named.
    return (None,) * (leaf.ndim - len(axes)) + tuple(axes)


def _is_variable(node: Any) -> bool:
    # By what it can do: this folder knows nothing of Flax.
    return hasattr(node, "get_metadata") and hasattr(node, "get_value")


def check_divides(name: str, shape: tuple[int, ...], axes: LogicalAxes, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError if a dimension does not divide over the mesh axes that its logical axis stands for.

    >>> check_divides("kernel", (4, 6), ("fsdp", "ffn"), AbstractMesh((2, 3), ("fsdp", "tensor")))
    """
    for dim, entry in enumerate(logical_to_spec(axes, mesh)):
        over, ranks = ranks_of(entry, mesh)
        if shape[dim] % ranks:
            raise ValueError(
                f"{name} of shape {shape}: dimension {dim} ({axes[dim]!r}) does not divide over mesh axes "
                f"{over} = {ranks}; change that size or the mesh"
            )


def shardings_of(tree: PyTree, mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """Return the sharding on ``mesh`` of every leaf of ``tree``, in the order of ``jax.tree.leaves``.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes; as `logical_to_spec`.

    >>> kernel = nnx.Param(jnp.ones((2, 2)), logical_axes=("fsdp", "ffn"))
    >>> tuple(shardings_of(kernel, AbstractMesh((2, 2), ("fsdp", "tensor")))[0].spec)
    ('fsdp', 'tensor')
    """
    found = leaves_with_axes(tree)
    for name, leaf, axes in found:
        check_divides(name, leaf.shape, axes, mesh)
    return [named_sharding(axes, mesh) for _, _, axes in found]


def create_sharded(make: Callable[..., Array], *args: Array, shape: tuple[int, ...], axes: LogicalAxes) -> Array:
    """Return ``make(*args)``, placed where its logical axes put it on the mesh in use.

    Inside ``jax.jit`` every device makes its own part and none holds the whole. Outside, the whole is made on the
    default device first, so that its values are those without a mesh, bit by bit.

    Args:
        make: gives an array of ``shape``.
        *args: the arrays that it needs, e.g. a key; it closes over none.
        shape: of the result.
        axes: a logical name or None for each dimension.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes; as `logical_to_spec`.

    >>> create_sharded(lambda: jnp.ones((2, 4)), shape=(2, 4), axes=("fsdp", "ffn")).shape
    (2, 4)
    """
    mesh = current_mesh()
    if mesh is None:
        return make(*args)
    check_divides("a parameter", shape, axes, mesh)
    if isinstance(jnp.zeros(()), Tracer):  # under jit
        return auto_region(lambda *args: constrain(make(*args), axes), axes)(*args)
    return constrain(make(*args), axes)
