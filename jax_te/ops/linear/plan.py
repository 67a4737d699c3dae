"""Where the GEMMs of a linear layer run on a mesh, and which collectives stand between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import AbstractMesh, PartitionSpec

from jax_te.quantize import BlockQuantizer, GemmState, MXQuantizer, QuantizedKernel, Quantizer, TensorQuantizer
from jax_te.quantize.internal import BLOCK, MX_BLOCK, ROLES, Precision, ambient_observer
from jax_te.sharding import current_mesh
from jax_te.sharding.internal import (
    REPLICATED,
    Dims,
    MeshAxes,
    activation_axis,
    current_rules,
    device_mesh,
    flat,
    local_shape,
    mesh_dims,
    partition_spec,
)
from jax_te.typing import Array, LogicalAxes


class LinearOptions(NamedTuple):
    """The static options of one linear layer inside of an op.

    Args:
        x_axes: logical axes of the input. None: those of the output's leading axes, and ``"hidden"`` or the kernel's
            first.
        kernel_axes: logical axes of the kernel, and of its gradient. With these and ``out_axes`` named, each device of
            a mesh runs the GEMMs of its shards, and communicates what `jax_te.ops.linear.plan.Plan` says.
        out_axes: logical axes of the output; required on a mesh with Explicit axes.
        save_original_input: keep the input itself as the residual, and quantize it again in backward, instead of its
            quantized copy: less memory where the input is alive anyway. Not with delayed scaling.
        name: the layer's path, under which its quantized tensors are observed, see
            `jax_te.quantize.observe_quantization`.

    >>> LinearOptions(kernel_axes=("fsdp", "ffn"), out_axes=("batch", "sequence", "ffn")).name is None
    True
    """

    x_axes: LogicalAxes | None = None
    kernel_axes: LogicalAxes | None = None
    out_axes: LogicalAxes | None = None
    save_original_input: bool = False
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``x [..., k] @ kernel [k, *n]``, or an op on the rows of ``x``, on the devices of a mesh. Hashable.

    Between the GEMMs a device has its rows of ``x``, all-gathered along ``x_all_gather`` (the sequence under sequence
    parallelism), and its shards of ``k`` and ``n`` of the kernel, all-gathered along ``kernel_all_gather`` (fully
    sharded parameters). Where ``k`` is sharded (row-parallel layers), the output is all-reduced over
    ``contracting_axes``, or reduce-scattered along ``out_reduce_scatter``. Backward has the transpose of each.

    Args:
        mesh: None: on one device, or as the compiler partitions it.
        reason: why there is a mesh of several devices, and they cannot run the op by themselves.
        constrained: there is a mesh, and the compiler partitions the op by constraints on its arrays.
        x, kernel, out: how input, kernel and output are sharded outside of the GEMMs.
        x_all_gather, out_reduce_scatter: mesh axes for each leading dimension of input and output.
        kernel_all_gather: mesh axes for each dimension of the kernel.
        contracting_axes: mesh axes that shard the sum over ``k``.
        row_axes: mesh axes that shard the rows while the GEMMs run.
        feature_axes: mesh axes that shard the output's features.
        amax_axes: mesh axes that reduce a shard's amax to the tensor's.
        x_spec, kernel_spec, bias_spec, out_spec: PartitionSpecs of the arrays outside of the GEMMs.

    Source: Shoeybi et al. 2019 (tensor parallelism), Korthikanti et al. 2022 (sequence parallelism), Rajbhandari et al.
    2020 (ZeRO-3).
    """

    mesh: AbstractMesh | None = None
    reason: str | None = None
    constrained: bool = False
    x: Dims = ()
    kernel: Dims = ()
    out: Dims = ()
    x_all_gather: Dims = ()
    out_reduce_scatter: Dims = ()
    kernel_all_gather: Dims = ()
    contracting_axes: MeshAxes = ()
    row_axes: MeshAxes = ()
    feature_axes: MeshAxes = ()
    amax_axes: MeshAxes = ()
    x_spec: PartitionSpec = REPLICATED
    kernel_spec: PartitionSpec = REPLICATED
    bias_spec: PartitionSpec = REPLICATED
    out_spec: PartitionSpec = REPLICATED

    def without_mesh(self, reason: str | None) -> Plan:
        """Return the plan that leaves the op to the compiler for ``reason``; the plan itself for None."""
        return self if reason is None or self.mesh is None else _partitioned(reason)


UNSHARDED = Plan()
"""On one device."""

CONSTRAINED = Plan(constrained=True)
"""On a mesh of one device, or inside of a ``shard_map`` that left axes to the compiler."""


def _partitioned(reason: str) -> Plan:
    return Plan(reason=reason, constrained=True)


def linear_plan(
    x_shape: tuple[int, ...],
    kernel: Array | QuantizedKernel,
    options: LinearOptions,
    precision: Precision = Precision(),
    state: GemmState | None = None,
) -> Plan:
    """Return how a linear layer runs on the mesh in use.

    Args:
        x_shape: of the whole input.
        kernel: ``[k, *n]``.
        options: logical axes of input, kernel and output.
        precision: blocks of the quantizers' scales must not lie on two devices.
        state: the recipe's state, if it has any.
    """
    x_axes, kernel_axes, out_axes, *_ = options
    mesh = device_mesh()
    if mesh is None:
        return UNSHARDED if current_mesh() is None else CONSTRAINED
    if out_axes is None or kernel_axes is None:
        return _partitioned("the call does not name the logical axes of its output and kernel (out_axes, kernel_axes)")
    if ambient_observer.value is not None:
        return _partitioned("its quantized tensors are observed, which is done on whole arrays")
    if state is not None and state["x"]["scale"].ndim > 0:
        return _partitioned("each part of the batch has scales of its own (tp_only_amax_red)")
    lead = len(x_shape) - 1
    if x_axes is None:
        x_axes = (*out_axes[:lead], activation_axis(kernel_axes[0]))
    plan = _linear_plan(mesh, current_rules(), (x_shape, kernel.shape), (x_axes, kernel_axes, out_axes), precision)
    return plan if not isinstance(kernel, QuantizedKernel) else plan.without_mesh(_stored_whole(kernel))


# A model has few different layers, each of which is traced many times: forward, backward, remat, every microbatch.
@functools.lru_cache(maxsize=4096)
def _linear_plan(
    mesh: AbstractMesh,
    rules: object,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    axes: tuple[LogicalAxes, LogicalAxes, LogicalAxes],
    precision: Precision,
) -> Plan:
    """Return the plan for these shapes; ``rules`` are the ambient ones, here because they are part of the key."""
    x, kernel, out = (mesh_dims(names, mesh) for names in axes)
    (x_shape, kernel_shape), lead = shapes, len(x) - 1
    rows = tuple(_common(of_x, of_out) for of_x, of_out in zip(x[:-1], out[:lead], strict=True))
    features, contracting = out[lead:], x[-1]
    plan = Plan(
        mesh=mesh,
        x=x,
        kernel=kernel,
        out=out,
        x_all_gather=_beyond(x[:-1], rows, mesh),
        out_reduce_scatter=_beyond(out[:lead], rows, mesh),
        kernel_all_gather=_beyond(kernel, (contracting, *features), mesh),
        contracting_axes=tuple(axis for axis in contracting if mesh.shape[axis] > 1),
        row_axes=flat(rows),
        feature_axes=flat(features),
        amax_axes=mesh.axis_names,
        x_spec=partition_spec(x),
        kernel_spec=partition_spec(kernel),
        bias_spec=partition_spec(features),
        out_spec=partition_spec(out),
    )
    reason = _disagreement(plan, features)
    if reason is not None:
        return _partitioned(reason)
    for name, shape, dims in (
        ("input", x_shape, x),
        ("kernel", kernel_shape, kernel),
        ("output", (*x_shape[:-1], *kernel_shape[1:]), out),
    ):
        if local_shape(shape, dims, mesh) is None:
            return _partitioned(
                f"the {name} {shape} does not divide over {partition_spec(dims)} of the mesh {dict(mesh.shape)}"
            )
    return plan.without_mesh(_split_blocks(precision, rows, (contracting, *features), mesh, shapes))


def norm_plan(plan: Plan) -> Plan:
    """Return the plan of a linear layer behind a norm, which needs whole rows of the input."""
    if plan.contracting_axes:
        return _partitioned(f"the norm's input is split along its features, {plan.x_spec}")
    return plan


def row_plan(shape: tuple[int, ...], axes: LogicalAxes | None, *, whole: int) -> Plan:
    """Return how an op that treats each row of ``x`` by itself runs on the mesh in use.

    Args:
        shape: of ``x``.
        axes: its logical axes.
        whole: number of trailing dimensions that must be whole on every device.
    """
    mesh = device_mesh()
    if mesh is None:
        return UNSHARDED if current_mesh() is None else CONSTRAINED
    if axes is None:
        return _partitioned("the call does not name the logical axes of its output (out_axes)")
    dims = mesh_dims(axes, mesh)
    if any(mesh.shape[axis] > 1 for axis in flat(dims[len(dims) - whole :])):
        return _partitioned(f"its rows are split over devices: {partition_spec(dims)}")
    if local_shape(shape, dims, mesh) is None:
        return _partitioned(
            f"the input {shape} does not divide over {partition_spec(dims)} of the mesh {dict(mesh.shape)}"
        )
    spec = partition_spec(dims)
    return Plan(mesh=mesh, x=dims, out=dims, row_axes=flat(dims), x_spec=spec, out_spec=spec)


def _beyond(dims: Dims, without: Dims, mesh: AbstractMesh) -> Dims:
    """Return the axes of ``dims`` behind those of ``without``, if they have more than one device; () for none."""
    pairs = zip(dims, without, strict=True)
    rest = tuple(tuple(a for a in axes[len(part) :] if mesh.shape[a] > 1) for axes, part in pairs)
    return rest if any(rest) else ()


def _common(one: MeshAxes, other: MeshAxes) -> MeshAxes:
    """Return the leading axes that both have."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def _disagreement(plan: Plan, features: Dims) -> str | None:
    """Return why the collectives between these shardings are none of `Plan`'s, or None."""
    needed = (plan.x[-1], *features)
    fits = (
        len(plan.kernel) == len(needed)
        and all(axes[: len(part)] == part for axes, part in zip(plan.kernel, needed, strict=True))
        and all(axis in plan.contracting_axes for axis in flat(plan.out_reduce_scatter))
        and all(axis in plan.feature_axes for axis in flat(plan.x_all_gather))
        and all(axis in plan.row_axes for axis in flat(plan.kernel_all_gather))
    )
    if fits:
        return None
    return (
        f"input {plan.x_spec}, kernel {plan.kernel_spec} and output {plan.out_spec} are split in ways that do not go "
        "together"
    )


def _stored_whole(kernel: QuantizedKernel) -> str | None:
    """Return why a kernel that was quantized before the call has no shards for the devices, or None."""
    if kernel.is_opaque:
        return None if kernel.form.per_device else "its kernel was quantized as a whole, for one device"
    return None if isinstance(kernel.quantizer, TensorQuantizer) else "its kernel was quantized in blocks as a whole"


def _split_blocks(
    precision: Precision,
    rows: Dims,
    weights: Dims,
    mesh: AbstractMesh,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> str | None:
    """Return why quantizing the shards is not quantizing the whole, or None.

    ``rows`` and ``weights`` say how input and kernel of ``shapes`` are sharded while the GEMMs run.
    """
    quantizers = [getattr(precision, role).quantizer for role in ROLES]
    if all(quantizer is None or isinstance(quantizer, TensorQuantizer) for quantizer in quantizers):
        return None
    if not all(quantizer is None or isinstance(quantizer, _BY_SHARD) for quantizer in quantizers):
        return f"recipe {precision.recipe_name!r} has scales of the whole tensor beside those of its blocks"
    multiple = max(_block(quantizer) for quantizer in quantizers)
    tokens, kernel = local_shape(shapes[0][:-1], rows, mesh), local_shape(shapes[1], weights, mesh)
    assert tokens is not None
    assert kernel is not None
    sizes = {"tokens in a row": tokens[-1] if tokens else 1, "input size": kernel[0], "output size": kernel[-1]}
    for name, size in sizes.items():
        if size % multiple:
            return f"{name} of one device, {size}, is no multiple of the {multiple} values of a scale"
    return None


_BY_SHARD = (TensorQuantizer, BlockQuantizer, MXQuantizer)
"""Quantizers that need no more of the rest of a tensor than its amax."""


def _block(quantizer: Quantizer | None) -> int:
    return BLOCK if isinstance(quantizer, BlockQuantizer) else MX_BLOCK if isinstance(quantizer, MXQuantizer) else 1
