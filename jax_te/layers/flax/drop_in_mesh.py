"""Placement of a GEMM's arrays on the mesh in use, for Flax's layers, so that each device can run its part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_te.sharding import (
    Dims,
    current_rules,
    device_mesh,
    entry_axes,
    flat,
    free_axes,
    indivisible_reason,
    known_names,
    partition_spec,
)
from jax_te.typing import Array


class GemmOrder(NamedTuple):
    """Contracted axes of a ``dot_general``'s input and kernel, in pairs, and the remaining axes, in order.

    ``batch`` and ``kernel_batch`` are pairs of axes that stay: the parameter holds a kernel for each of their places.
    """

    rows: Sequence[int]
    summed: Sequence[int]
    kernel_summed: Sequence[int]
    features: Sequence[int]
    batch: Sequence[int] = ()
    kernel_batch: Sequence[int] = ()


class GemmAxes(NamedTuple):
    """Placement of ``x [*rows, k]``, ``kernel [k, *n]`` and their product on the mesh.

    Or the reason why it is unknown; all None without a mesh.
    """

    x: PartitionSpec | None = None
    kernel: PartitionSpec | None = None
    out: PartitionSpec | None = None
    why: str | None = None


def gemm_axes(x: Array, kernel: Array, order: GemmOrder, names: Sequence[Any] | None, multiple: int = 1) -> GemmAxes:
    """Return the placement of a GEMM's arrays on the mesh in use.

    Along Explicit axes their types determine it. Along Auto axes it follows from the kernel's names and, for the
    input's first two axes unless they are contracted, from the rules of ``"batch"`` and ``"sequence"``. Values do not
    depend on it.

    Args:
        x, kernel: input and kernel, as ``dot_general`` received them.
        order: order of their axes.
        names: names of the kernel's axes, in Flax's or this package's rules, or mesh axes; None: it has none.
        multiple: multiple that one device's GEMMs require of features.

    >>> gemm_axes(jax.numpy.ones((2, 4)), jax.numpy.ones((4, 8)), GemmOrder([0], [1], [0], [1]), None).x is None
    True
    """
    mesh = device_mesh()
    if mesh is None:
        return GemmAxes()
    auto = _auto_axes(mesh)
    of_rows = _resolved_dims(("batch", "sequence"), mesh, auto)[: len(order.rows)]
    of_kernel = _resolved_dims(names or (), mesh, auto)
    why = _unknown(auto, set(flat(of_rows)), None if names is None else set(flat(of_kernel)))
    if why is not None:
        return GemmAxes(why=why)
    x_dims, kernel_dims = _operand_dims(order, (_typed(x, mesh), _typed(kernel, mesh)), of_rows, of_kernel, auto)
    gemm, lead = _gemm_dims(order, x_dims, kernel_dims), len(order.rows)
    inputs, outputs = ([kernel.shape[axis] for axis in axes] for axes in (order.kernel_summed, order.features))
    why = (
        _summed_apart(order, x_dims, kernel_dims)
        or indivisible_reason("input", x.shape, x_dims, mesh)
        or indivisible_reason("kernel", kernel.shape, kernel_dims, mesh)
        or _misfit("input", inputs, gemm.x[lead:], mesh, multiple)
        or _misfit("output", outputs, gemm.out[lead:], mesh, multiple)
    )
    if why is not None:
        return GemmAxes(why=why)
    return GemmAxes(partition_spec(gemm.x), partition_spec(gemm.kernel), partition_spec(gemm.out))


class _GemmDims(NamedTuple):
    """Mesh axes for each dimension of ``x [*rows, k]``, ``kernel [k, *n]`` and their product."""

    x: Dims
    kernel: Dims
    out: Dims


def _operand_dims(
    order: GemmOrder, typed: tuple[Dims, Dims], of_rows: Dims, of_kernel: Dims, auto: set[str]
) -> tuple[Dims, Dims]:
    """Return the mesh axes for each dimension of input and kernel as ``dot_general`` received them.

    Args:
        order: order of their axes.
        typed: Explicit axes, from their types.
        of_rows: Auto axes of the input's first rows.
        of_kernel: Auto axes of the kernel's dimensions, empty if it has no names.
        auto: mesh axes of type Auto.
    """
    x_dims, kernel_dims = map(list, typed)
    for axis, found in zip(order.rows, of_rows, strict=False):
        x_dims[axis] += found
    for axis, found in enumerate(of_kernel):
        kernel_dims[axis] += found
    taken = _of_batch(order, tuple(x_dims))
    for axis, other in zip(order.summed, order.kernel_summed, strict=True):
        # A row-parallel layer: its input is the output of a column-parallel one. Fully sharded kernels are gathered.
        x_dims[axis] += tuple(name for name in kernel_dims[other] if name in auto and name not in taken)
    return tuple(x_dims), tuple(kernel_dims)


def _of_batch(order: GemmOrder, x_dims: Dims) -> set[str]:
    """Return the mesh axes that split the rows of the input."""
    return {name for axis in order.rows for name in x_dims[axis]}


def _gemm_dims(order: GemmOrder, x_dims: Dims, kernel_dims: Dims) -> _GemmDims:
    """Return the mesh axes of the GEMM's arrays in its own order, with contracted axes merged into one."""
    rows = tuple(x_dims[axis] for axis in order.rows)
    summed = tuple(x_dims[axis] for axis in order.summed)[:1]
    kernel_summed = tuple(kernel_dims[axis] for axis in order.kernel_summed)[:1]
    features = tuple(kernel_dims[axis] for axis in order.features)
    # Fully sharded parameters have the batch's mesh axes: the batch keeps them, and kernels are all-gathered.
    taken = _of_batch(order, x_dims)
    out = tuple(tuple(name for name in axes if name not in taken) for axes in features)
    return _GemmDims((*rows, *summed), (*kernel_summed, *features), (*rows, *out))


def _summed_apart(order: GemmOrder, x_dims: Dims, kernel_dims: Dims) -> str | None:
    """Return the reason why merged contraction axes cannot be sharded this way, or None."""
    later = [x_dims[axis] for axis in order.summed[1:]] + [kernel_dims[axis] for axis in order.kernel_summed[1:]]
    return "it sums over several axes, and another than the first of them is split" if flat(tuple(later)) else None


def _misfit(name: str, sizes: Sequence[int], dims: Dims, mesh: AbstractMesh, multiple: int) -> str | None:
    """Return the reason why one device's GEMM cannot run on its shard of the features, or None."""
    ranks = math.prod(mesh.shape[axis] for axis in flat(dims))
    size = math.prod(sizes) // ranks
    # XLA pads such a GEMM; TE cannot run it.
    if ranks == 1 or size % multiple == 0:
        return None
    return f"the {name} size of one device, {size}, is not a multiple of {multiple}"


def kernel_names(kernel: nnx.Variable, rank: int) -> tuple[Any, ...] | None:
    """Return the names of a kernel's axes in its metadata, without those of a stack; None if it has none.

    Args:
        kernel: kernel of a layer of Flax.
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
    """Return the reason why names do not determine a GEMM's placement over the Auto axes, or None.

    Args:
        auto: mesh axes of type Auto.
        rows: mesh axes that rules assign to the input's rows.
        of_kernel: mesh axes that the kernel's names assign to it; None if it has no names.
    """
    if of_kernel is None and auto - rows:
        return (
            f"its kernel names no axes, and may be split over {', '.join(sorted(auto - rows))} of the mesh; name them: "
            "kernel_init=nnx.with_partitioning(init, names) before quantize_model, DotGeneral(kernel_axes=names), or "
            "nn.with_logical_partitioning in Linen"
        )
    # Otherwise each device would compute the whole batch if the rules use another name for it.
    if of_kernel is not None and not rows and auto - of_kernel:
        return (
            f"no rule says which mesh axis splits the batch, of {', '.join(sorted(auto - of_kernel))}; give one: "
            "nnx.logical_axis_rules([('batch', axis), ...])"
        )
    return None


def _auto_axes(mesh: AbstractMesh) -> set[str]:
    """Return the axes with several devices along which types do not determine an array's placement."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Auto and mesh.shape[name] > 1}


def _typed(x: Array, mesh: AbstractMesh) -> Dims:
    """Return the Explicit mesh axes in the type of ``x``, for each of its axes."""
    if AxisType.Explicit not in mesh.axis_types:
        return ((),) * x.ndim
    return tuple(map(entry_axes, jax.typeof(x).sharding.spec))


def _resolved_dims(names: Iterable[Any], mesh: AbstractMesh, auto: set[str]) -> Dims:
    """Return the Auto axes that rules assign to each name, each axis once: the first name keeps it."""
    rules, free, taken, dims = current_rules(mesh), free_axes(mesh), set[str](), []
    known = known_names(rules)
    for name in names:
        # None and PartitionSpec.UNCONSTRAINED name no axis.
        parts = (name,) if isinstance(name, str) else name if isinstance(name, (tuple, list)) else ()
        # A name without a rule may be a mesh axis itself: nnx.with_partitioning(init, (None, "model")).
        axes = [axis for part in parts for axis in (rules.mesh_axes(part) if part in known else (part,))]
        axes = [axis for axis in axes if axis in auto and axis in free and axis not in taken]
        taken |= set(axes)
        dims.append(tuple(axes))
    return tuple(dims)
