"""How the arrays of a GEMM in one of Flax's layers lie on the mesh in use, so that each device can run its part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_te.sharding.internal import (
    Dims,
    MeshAxes,
    current_rules,
    device_mesh,
    flat,
    free_axes,
    local_shape,
    partition_spec,
)
from jax_te.typing import Array


class GemmOrder(NamedTuple):
    """Which axes of input and kernel a ``dot_general`` sums over, in pairs, and which are left, in order."""

    rows: Sequence[int]
    summed: Sequence[int]
    kernel_summed: Sequence[int]
    features: Sequence[int]


class GemmAxes(NamedTuple):
    """Where ``x [*rows, k]``, ``kernel [k, *n]`` and their product lie on the mesh.

    Or why that is unknown; all None without a mesh.
    """

    x: PartitionSpec | None = None
    kernel: PartitionSpec | None = None
    out: PartitionSpec | None = None
    why: str | None = None


def gemm_axes(x: Array, kernel: Array, order: GemmOrder, names: Sequence[Any] | None, multiple: int = 1) -> GemmAxes:
    """Return where the arrays of a GEMM lie on the mesh in use.

    Along Explicit axes their types say it. Along Auto axes the kernel's names do, and of the input the rules of
    ``"batch"`` and ``"sequence"``: its first two axes, unless these are summed over. Values do not depend on it.

    Args:
        x, kernel: as ``dot_general`` got them.
        order: of their axes.
        names: of the kernel's axes, in Flax's or this package's rules, or mesh axes; None: it has none.
        multiple: of the features that one device's GEMMs take.

    >>> gemm_axes(jax.numpy.ones((2, 4)), jax.numpy.ones((4, 8)), GemmOrder([0], [1], [0], [1]), None).x is None
    True
    """
    mesh = device_mesh()
    if mesh is None:
        return GemmAxes()
    auto = _auto_axes(mesh)
    x_dims, kernel_dims = (_typed(array, mesh) for array in (x, kernel))
    rows, of_kernel = _resolved(("batch", "sequence"), mesh, auto), _resolved(names or (), mesh, auto)
    why = _unknown(auto, set(flat(rows[: len(order.rows)])), None if names is None else set(flat(of_kernel)))
    if why is not None:
        return GemmAxes(why=why)
    for axis, found in zip(order.rows, rows, strict=False):
        x_dims[axis] += found
    taken = {name for axis in order.rows for name in x_dims[axis]}
    for axis, found in enumerate(of_kernel):
        kernel_dims[axis] += found
    for axis, other in zip(order.summed, order.kernel_summed, strict=True):
        # A row-parallel layer: its input is what a column-parallel one computed. Fully sharded kernels are gathered.
        x_dims[axis] += tuple(name for name in kernel_dims[other] if name in auto and name not in taken)
    one, other = ([dims[axis] for axis in axes] for dims, axes in ((x_dims, order.summed), (kernel_dims, order[2])))
    if flat((*one[1:], *other[1:])):
        return GemmAxes(why="it sums over several axes, and another than the first of them is split")
    # Fully sharded parameters have the batch's mesh axes: the batch keeps them, and kernels are all-gathered.
    features = [tuple(name for name in kernel_dims[axis] if name not in taken) for axis in order.features]
    lead = [x_dims[axis] for axis in order.rows]
    shapes = {"input": (x.shape, x_dims), "kernel": (kernel.shape, kernel_dims)}
    for name, (shape, dims) in shapes.items():
        if local_shape(shape, tuple(dims), mesh) is None:
            spec = partition_spec(tuple(dims))
            return GemmAxes(why=f"the {name} {shape} does not divide over {spec} of the mesh {dict(mesh.shape)}")
    for name, axes, dims in (("input", order.kernel_summed, one), ("output", order.features, features)):
        ranks = math.prod(mesh.shape[axis] for axis in flat(tuple(dims)))
        size = math.prod(kernel.shape[axis] for axis in axes) // ranks
        # XLA pads such a GEMM; TE's cannot run it.
        if ranks > 1 and size % multiple:
            return GemmAxes(why=f"the {name} size of one device, {size}, is no multiple of {multiple}")
    of_kernel = (*other[:1], *(kernel_dims[axis] for axis in order.features))
    x_spec, kernel_spec, out_spec = map(partition_spec, ((*lead, *one[:1]), of_kernel, (*lead, *features)))
    return GemmAxes(x_spec, kernel_spec, out_spec)


def kernel_names(kernel: nnx.Variable, rank: int) -> tuple[Any, ...] | None:
    """Return the names of a kernel's axes in its metadata, without those of a stack; None if it has none.

    Args:
        kernel: of a layer of Flax.
        rank: number of its axes without those of a stack, which are in front.

    >>> kernel_names(nnx.Param(jax.numpy.ones((4, 8)), logical_axes=("embed", "mlp")), 2)
    ('embed', 'mlp')
    """
    metadata = kernel.get_metadata()
    found: Any = metadata.get("logical_axes") or metadata.get("out_sharding")
    if found is None:
        return None
    # A layout holds a sharding, and a sharding a spec; Flax takes all three.
    found = getattr(found, "sharding", found)
    own = dict(metadata.get("sharding_rules") or ())
    names = tuple(own.get(name, name) for name in getattr(found, "spec", found))
    return (*names, *(None,) * (rank - len(names)))[-rank:]


def _unknown(auto: set[str], rows: set[str], of_kernel: set[str] | None) -> str | None:
    """Return why the names do not tell how a GEMM lies over the Auto axes, or None.

    Args:
        auto: these axes.
        rows: those that rules give the input's rows.
        of_kernel: those that the kernel's names give it; None if it has no names.
    """
    if of_kernel is None and auto - rows:
        return (
            f"its kernel names no axes, and may be split over {', '.join(sorted(auto - rows))} of the mesh; name them: "
            "kernel_init=nnx.with_partitioning(init, names) before quantize_model, DotGeneral(kernel_axes=names), or "
            "nn.with_logical_partitioning in Linen"
        )
    # Otherwise each device would compute the whole batch, where the rules call it by a name of their own.
    if of_kernel is not None and not rows and auto - of_kernel:
        return (
            f"no rule says which mesh axis splits the batch, of {', '.join(sorted(auto - of_kernel))}; give one: "
            "nnx.logical_axis_rules([('batch', axis), ...])"
        )
    return None


def _auto_axes(mesh: AbstractMesh) -> set[str]:
    """Return the axes of several devices along which types do not say how an array lies."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Auto and mesh.shape[name] > 1}


def _typed(x: Array, mesh: AbstractMesh) -> list[MeshAxes]:
    """Return the Explicit mesh axes in the type of ``x``, for each of its axes."""
    if AxisType.Explicit not in mesh.axis_types:
        return [()] * x.ndim
    entries = tuple(jax.typeof(x).sharding.spec)
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]


def _resolved(names: Iterable[Any], mesh: AbstractMesh, auto: set[str]) -> Dims:
    """Return the Auto axes that rules give each name, each once: the first name keeps it."""
    rules, free, taken, dims = current_rules(mesh), free_axes(mesh), set[str](), []
    known = {*rules.names(), *dict(getattr(rules, "others", ()))}
    for name in names:
        # None or PartitionSpec.UNCONSTRAINED: no axis.
        parts = (name,) if isinstance(name, str) else name if isinstance(name, (tuple, list)) else ()
        # A name without a rule may be a mesh axis itself: nnx.with_partitioning(init, (None, "model")).
        axes = [axis for part in parts for axis in (rules.mesh_axes(part) if part in known else (part,))]
        axes = [axis for axis in axes if axis in auto and axis in free and axis not in taken]
        taken |= set(axes)
        dims.append(tuple(axes))
    return tuple(dims)
