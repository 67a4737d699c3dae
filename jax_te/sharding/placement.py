"""Placement of the arrays of a model or a train state on a mesh, by the axes of their Variables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import apply_rules
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_te._validation import check_leaves, checked, log_once
from jax_te.sharding.constrain import auto_region, constrain
from jax_te.sharding.rules import current_mesh, current_rules, known_names, logical_to_spec, named_sharding, ranks_of
from jax_te.typing import Array, LogicalAxes, PyTree

Axes = LogicalAxes | PartitionSpec
"""Logical axes of this package, or a placement by Flax's own names."""


def leaves_with_axes(tree: PyTree) -> list[tuple[str, Any, Axes]]:
    """Return name, leaf and axes of every leaf of ``tree``, in the order of ``jax.tree.leaves``.

    The axes are those of the Variable around the leaf, see `variable_axes`; optimizer state that mirrors a parameter
    keeps its Variable.

    >>> leaves_with_axes({"a": nnx.Param(jnp.ones((2, 2)), logical_axes=("fsdp", "ffn")), "b": jnp.ones(2)})[1][::2]
    ('b', (None,))
    """
    check_leaves("the tree", tree)
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        for inside, leaf in jax.tree_util.tree_leaves_with_path(node.get_value() if _is_variable(node) else node):
            name = jax.tree_util.keystr((*path, *inside), simple=True, separator="/")
            found.append((name, leaf, variable_axes(node, leaf) if _is_variable(node) else (None,) * leaf.ndim))
    return found


def variable_axes(variable: Any, leaf: Any) -> Axes:
    """Return the axes of a Variable's array: the logical ones in its metadata, after None for the axes of a stack.

    Axes in Flax's metadata (``nnx.with_partitioning``, ``out_sharding``) become a PartitionSpec, by the rules that are
    set in Flax and the Variable's own. None for every dimension where there are no axes, or the array has another shape
    than the Variable.

    >>> kernel = nnx.Param(jnp.ones((4, 2, 2)), logical_axes=("fsdp", "ffn"))
    >>> variable_axes(kernel, kernel.get_value())
    (None, 'fsdp', 'ffn')
    """
    metadata = variable.get_metadata()
    axes = metadata.get("logical_axes")
    if axes is None and metadata.get("out_sharding"):
        return _place_in_flax(metadata["out_sharding"], metadata.get("sharding_rules"), leaf)
    # A quantized kernel has the shape of its values; its scales may have as many axes, but other sizes.
    if axes is None or leaf.ndim < len(axes) or leaf.shape != getattr(variable.get_value(), "shape", None):
        return (None,) * leaf.ndim
    # Layers stacked by nnx.vmap have one axis more than each layer named.
    return (None,) * (leaf.ndim - len(axes)) + tuple(axes)


def _place_in_flax(names: Any, rules: Any, leaf: Any) -> Axes:
    spec: Any = apply_rules(names, rules)
    # A layout holds a sharding, and a sharding a spec; Flax takes all three.
    spec = getattr(spec, "sharding", spec)
    spec = tuple(getattr(spec, "spec", spec))
    # Optimizer state such as Adafactor's keeps a Variable's metadata with sums over some of its axes.
    return PartitionSpec(*(spec if len(spec) <= leaf.ndim else ()), *(None,) * (leaf.ndim - len(spec)))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def check_divides(name: str, shape: tuple[int, ...], axes: Axes, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError if a dimension does not divide over the mesh axes of its logical axis.

    >>> check_divides("kernel", (4, 6), ("fsdp", "ffn"), AbstractMesh((2, 3), ("fsdp", "tensor")))
    """
    for dim, entry in enumerate(logical_to_spec(axes, mesh)):
        over, ranks = ranks_of(entry, mesh)
        if shape[dim] % ranks:
            split = str(axes[dim]).endswith("_replicas")
            remedy = "change that size or the mesh" + (", or leave out distributed_optimizer" if split else "")
            raise ValueError(
                f"{name} of shape {shape}: dimension {dim} ({axes[dim]!r}) does not divide over mesh axes "
                f"{over} = {ranks}; {remedy}"
            )


@checked
def shardings_of(tree: PyTree, mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """Return the sharding on ``mesh`` of every leaf of ``tree``, in the order of ``jax.tree.leaves``.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes; see also `logical_to_spec`.

    >>> kernel = nnx.Param(jnp.ones((2, 2)), logical_axes=("fsdp", "ffn"))
    >>> tuple(shardings_of(kernel, AbstractMesh((2, 2), ("fsdp", "tensor")))[0].spec)
    ('fsdp', 'tensor')
    """
    found = leaves_with_axes(tree)
    for name, leaf, axes in found:
        check_divides(name, leaf.shape, axes, mesh)
    return [named_sharding(axes, mesh) for _, _, axes in found]


def log_whole_parameters(params: PyTree, mesh: Mesh | AbstractMesh) -> None:
    """Log matrices that no rule shards although an axis of the mesh could, once a process for the same ones.

    That is a matrix whose axes have no names while the mesh has an axis for parameters, or whose names have rules for
    other axes than the mesh's while the mesh has an axis that no rule names. Norms, which are replicated on purpose,
    vectors, and arrays placed by Flax's names are left out.

    Args:
        params: a tree of Variables.
        mesh: mesh that holds the arrays, or will.
    """
    large = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    unnamed, unused = _axes_left(large, mesh)
    found: list[_Whole] = []
    variables = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    for path, variable in variables:
        value = variable.get_value()
        axes = variable_axes(variable, value)
        if _is_whole_matrix(axes, mesh) and (able := unused if any(axes) else unnamed):
            found.append(_Whole(jax.tree_util.keystr(path, simple=True, separator="."), value.shape, axes, able))
    if found:
        found.sort(key=lambda whole: -math.prod(whole.shape))
        more = f"; and {len(found) - 12} smaller ones" if len(found) > 12 else ""
        log_once(
            f"{len(found)} of {len(variables)} parameters are whole on every device, and no rule splits them, though "
            f"the mesh could: {'; '.join(map(str, found[:12]))}{more}. To split one, name its axes, "
            "nnx.Param(value, logical_axes=('fsdp', 'ffn')) or Flax's out_sharding, and say over which mesh axes: "
            f"use_rules(ShardingRules(ffn=({large[-1]!r},))) or Flax's logical_axis_rules([('ffn', {large[-1]!r})])"
        )


class _Whole(NamedTuple):
    """A matrix that no rule shards: its name, shape and axes, and the mesh axes that could shard it."""

    name: str
    shape: tuple[int, ...]
    axes: Axes
    able: list[str]

    def __str__(self) -> str:
        shown = ", ".join(str(axis or "-") for axis in self.axes)
        return f"{self.name} {list(self.shape)} ({shown}) over {' or '.join(self.able)}"


def _axes_left(large: list[str], mesh: Mesh | AbstractMesh) -> tuple[list[str], list[str]]:
    """Return the mesh axes that could shard a matrix without names, and one with names.

    The former are all axes that do not shard only tokens, the latter those that no rule names.
    """
    rules = current_rules(mesh)
    used = {axis for name in known_names(rules) for axis in rules.mesh_axes(name)}
    of_tokens = {*rules.batch, *rules.sequence} - {*rules.fsdp, *rules.heads, *rules.ffn, *rules.vocab}
    return [axis for axis in large if axis not in of_tokens], [axis for axis in large if axis not in used]


def _is_whole_matrix(axes: LogicalAxes | PartitionSpec, mesh: Mesh | AbstractMesh) -> bool:
    """Return whether an array with these axes is a matrix other than a norm that neither rules nor Flax's names
    place."""
    if isinstance(axes, PartitionSpec):
        return False
    is_vector = sum(name != "components" for name in axes) < 2
    return not is_vector and "norm" not in axes and not any(logical_to_spec(axes, mesh))


def create_sharded(make: Callable[..., Array], *args: Array, shape: tuple[int, ...], axes: LogicalAxes) -> Array:
    """Return ``make(*args)``, placed on the mesh in use by its logical axes.

    Inside ``jax.jit`` every device makes its own part and none holds the whole. Outside, the whole is made on the
    default device first, so that its values are those without a mesh, bit by bit.

    Args:
        make: function that returns an array of ``shape``.
        *args: the arrays that it needs, e.g. a key; it closes over none.
        shape: shape of the result.
        axes: a logical name or None for each dimension.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes; see also `logical_to_spec`.

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
