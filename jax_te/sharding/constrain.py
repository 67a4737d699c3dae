"""Sharding constraints by logical axes, for every kind of mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_te._validation import checked
from jax_te.sharding.rules import ShardingRules, current_rules, entry_axes, entry_of, logical_to_spec
from jax_te.typing import Array, LogicalAxes


@checked
def constrain(x: Array, axes: LogicalAxes | PartitionSpec | None) -> Array:
    """Return ``x`` with the sharding that corresponds to its logical axes.

    The identity without a mesh and for ``axes=None``; a sharding constraint over the mesh's Auto axes, a reshard
    over its Explicit axes. Axes that a surrounding ``shard_map`` made manual are left alone.

    Raises:
        ValueError: if ``axes`` does not name every dimension; see also `logical_to_spec`.

    >>> constrain(jax.numpy.ones((2, 4)), ("batch", "hidden")).shape
    (2, 4)
    """
    if axes is None:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} logical axes {axes} for an array of shape {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    explicit, auto = _specs_by_type(axes if isinstance(axes, PartitionSpec) else tuple(axes), mesh, current_rules())
    if explicit is not None:
        x = jax.sharding.reshard(x, explicit)
    if auto is not None:
        x = _constrain_auto(x, auto)
    return x


# Under its own jit, because an eager constraint, or its transpose, refuses arrays that are not on the mesh yet.
@functools.partial(jax.jit, static_argnums=1)
def _constrain_auto(x: Array, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, spec)


@checked
def auto_region(fn: Callable[..., Any], out_axes: Any) -> Callable[..., Any]:
    """Return ``fn`` with the mesh's Explicit axes hidden from it, so that the compiler propagates shardings inside.

    Without Explicit axes that is ``fn`` itself. Differentiable.

    Args:
        fn: function of arrays and pytrees of arrays.
        out_axes: logical axes of its result: one tuple for an array, or a matching tree of tuples.

    Raises:
        ValueError: on an Explicit mesh when ``out_axes`` is None: the result needs a sharding.

    >>> x = jax.numpy.ones((2, 4))
    >>> with jax.set_mesh(jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)):
    ...     auto_region(lambda x: x @ x.T, ("batch", None))(x).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return fn
    if out_axes is None:
        raise ValueError(
            f"the mesh {mesh} has Explicit axes, so the result's sharding must be named: pass out_axes, "
            "for example out_axes=('batch', 'sequence', 'ffn')"
        )
    rules = current_rules()
    out = jax.tree.map(lambda axes: _specs_by_type(axes, mesh, rules)[0], out_axes, is_leaf=_is_axes)
    return jax.sharding.auto_axes(fn, out_sharding=out)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


# Cached, because layers constrain the same few kinds of arrays at every call.
@functools.lru_cache(maxsize=4096)
def _specs_by_type(
    axes: LogicalAxes | PartitionSpec, mesh: AbstractMesh, rules: ShardingRules
) -> tuple[PartitionSpec | None, PartitionSpec | None]:
    """Return an array's PartitionSpec over the mesh's Explicit axes and over its Auto axes; None where it has none."""
    spec = logical_to_spec(axes, mesh, rules)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def over(kind: AxisType) -> PartitionSpec | None:
        if kind not in mesh.axis_types:
            return None
        kept = []
        for entry in spec:
            kept.append(entry_of(tuple(axis for axis in entry_axes(entry) if types[axis] == kind)))
        return PartitionSpec(*kept)

    return over(AxisType.Explicit), over(AxisType.Auto)
