"""Placement of a linear layer's GEMMs on a mesh, and the collectives between them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, PartitionSpec

from jax_te.ops.sharded_vjp import Shards
from jax_te.quantize import ROLES, GemmState, Precision, QuantizedKernel, TensorRole, ambient_observer
from jax_te.sharding import (
    REPLICATED,
    Dims,
    MeshAxes,
    activation_axis,
    current_mesh,
    device_mesh,
    flat,
    free_axes,
    gathered_axes,
    indivisible_reason,
    local_shape,
    logical_to_spec,
    mesh_dims,
    partition_spec,
)
from jax_te.typing import Array, LogicalAxes


class LinearOptions(NamedTuple):
    """The static options of one linear layer inside of an op.

    Args:
        x_axes: logical axes of the input. None: those of the output's leading axes, and ``"hidden"`` or the kernel's
            first. This and the next two may be a PartitionSpec, which layers of Flax give.
        kernel_axes: logical axes of the kernel, and of its gradient. With these and ``out_axes`` named, each device of
            a mesh runs the GEMMs of its shards, and communicates what `jax_te.ops.linear.plan.Plan` says.
        out_axes: logical axes of the output; required on a mesh with Explicit axes.
        save_original_input: whether to keep the input itself as the residual, and quantize it again in backward,
            instead of its quantized copy: less memory where the input is alive anyway. For `jax_te.ops.dense` only, as
            the others compute the GEMM's input themselves, and not with delayed scaling.
        name: the layer's path, under which its quantized tensors are observed, see
            `jax_te.quantize.observe_quantization`.
        evaluation: whether the layer is evaluated, not trained: its state may be left out of what is differentiated.

    >>> LinearOptions(kernel_axes=("fsdp", "ffn"), out_axes=("batch", "sequence", "ffn")).name is None
    True
    """

    x_axes: LogicalAxes | PartitionSpec | None = None
    kernel_axes: LogicalAxes | PartitionSpec | None = None
    out_axes: LogicalAxes | PartitionSpec | None = None
    save_original_input: bool = False
    name: str | None = None
    evaluation: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``x [..., k] @ kernel [k, *n]``, or an op on the rows of ``x``, on the devices of a mesh. Hashable.

    Between the GEMMs a device has its rows of ``x``, all-gathered along ``x_all_gather`` (the sequence under sequence
    parallelism), and its shards of ``k`` and ``n`` of the kernel, all-gathered along ``kernel_all_gather`` (fully
    sharded parameters). Where ``k`` is sharded (row-parallel layers), the output is all-reduced over
    ``contracting_axes``, or reduce-scattered along ``out_reduce_scatter``. Backward has the transpose of each.

    Args:
        mesh: None: on one device, or as the compiler partitions it.
        reason: reason why devices cannot run the op by themselves, on a mesh of several devices.
        constrained: whether there is a mesh, and the compiler partitions the op by constraints on its arrays.
        x_all_gather, out_reduce_scatter: mesh axes for each leading dimension of input and output.
        kernel_all_gather: mesh axes for each dimension of the kernel.
        contracting_axes: mesh axes that shard the sum over ``k``.
        row_axes: mesh axes that shard the rows while the GEMMs run.
        feature_axes: mesh axes that shard the output's features.
        x_row_axes, out_row_axes: mesh axes that shard the rows of input and output outside of the GEMMs.
        rows: sizes of the rows of the GEMMs on one device; None: no mesh.
        is_by_rows: whether the op runs on matrices ``[t, k]``, see `by_rows`.
        amax_axes: mesh axes that reduce a shard's amax to the tensor's; of experts, those that do not split them.
        scale_axes: mesh axes whose shards share a current scale, for input, kernel and gradient. None: no mesh.
        x_spec, kernel_spec, bias_spec, out_spec: PartitionSpecs of the arrays outside of the GEMMs.

    Source: Shoeybi et al. 2019 (tensor parallelism), Korthikanti et al. 2022 (sequence parallelism), Rajbhandari et al.
    2020 (ZeRO-3).
    """

    mesh: AbstractMesh | None = None
    reason: str | None = None
    constrained: bool = False
    x_all_gather: Dims = ()
    out_reduce_scatter: Dims = ()
    kernel_all_gather: Dims = ()
    contracting_axes: MeshAxes = ()
    row_axes: MeshAxes = ()
    feature_axes: MeshAxes = ()
    x_row_axes: MeshAxes = ()
    out_row_axes: MeshAxes = ()
    rows: tuple[int, ...] | None = None
    is_by_rows: bool = False
    amax_axes: MeshAxes = ()
    scale_axes: tuple[MeshAxes, ...] | None = None
    x_spec: PartitionSpec = REPLICATED
    kernel_spec: PartitionSpec = REPLICATED
    bias_spec: PartitionSpec = REPLICATED
    out_spec: PartitionSpec = REPLICATED

    @property
    def device_axes(self) -> MeshAxes:
        """Mesh axes of the devices that run the op by themselves."""
        return () if self.mesh is None else free_axes(self.mesh)

    @property
    def per_device(self) -> PartitionSpec:
        """PartitionSpec of an array with one entry for each device in front."""
        return PartitionSpec(self.device_axes)

    def gathered(self, role: TensorRole) -> Dims:
        """Return the mesh axes along which an operand is all-gathered before its GEMMs, for each of its dimensions.

        The gradient of an output that was reduce-scattered is all-gathered along the same axes.
        """
        return {"x": self.x_all_gather, "kernel": self.kernel_all_gather, "grad": self.out_reduce_scatter}[role]

    def without_mesh(self, reason: str | None) -> Plan:
        """Return the plan that leaves the op to the compiler because of ``reason``; None: the plan itself."""
        return self if reason is None or self.mesh is None else _partitioned(reason)

    def by_rows(self) -> Plan:
        """Return the plan of an op on matrices of rows ``[t, k]``, all-gathered and scattered along their first axis.

        The gathered rows are then in the order of the devices, not of the tensor.
        """
        gathered, scattered = ((flat(dims),) if dims else () for dims in (self.x_all_gather, self.out_reduce_scatter))
        rows = (prod(self.rows or ()),)
        return replace(self, x_all_gather=gathered, out_reduce_scatter=scattered, rows=rows, is_by_rows=True)

    def shards(self, args: Any, out: Any) -> Shards | None:
        """Return the sharding of an op's arrays under this plan; None without a mesh.

        Args:
            args: PartitionSpecs of the arguments and of their cotangents, a tree prefix of them.
            out: specs of the output.
        """
        return None if self.mesh is None else Shards(mesh=self.mesh, args=args, out=out, cotangents=args)


def linear_plan(
    x_shape: tuple[int, ...],
    kernel: Array | QuantizedKernel,
    options: LinearOptions,
    precision: Precision = Precision(),
    state: GemmState | None = None,
) -> Plan:
    """Return the plan of a linear layer on the mesh in use.

    Args:
        x_shape: shape of the whole input.
        kernel: ``[k, *n]``.
        options: logical axes of input, kernel and output.
        precision: precision of the quantizers, the blocks of whose scales must not lie on two devices.
        state: the recipe's state, if it has any.
    """
    x_axes, kernel_axes, out_axes, *_ = options
    mesh = device_mesh()
    if mesh is None:
        return Plan(constrained=current_mesh() is not None)
    if out_axes is None or kernel_axes is None:
        return _partitioned("the call does not name the logical axes of its output and kernel (out_axes, kernel_axes)")
    if ambient_observer.value is not None:
        return _partitioned("its quantized tensors are observed, which is done on whole arrays")
    # A plan has one scale for each tensor, but here every part of the batch has its own.
    if state is not None and state["x"]["scale"].ndim > 0:
        return _partitioned("each part of the batch has scales of its own (tp_only_amax_red)")
    if x_axes is None:
        x_axes = (*out_axes[: len(x_shape) - 1], activation_axis(kernel_axes[0]))
    lacks_shards = kernel.lacks_shards if isinstance(kernel, QuantizedKernel) else None
    # This reason comes before those of block sizes: no other size would help a kernel without shards.
    precision = precision if lacks_shards is None else Precision()
    dims = (mesh_dims(x_axes, mesh), mesh_dims(kernel_axes, mesh), mesh_dims(out_axes, mesh))
    # Quantization of a kernel in advance knows only its own axes, and shares scales along these. A layer of Flax, whose
    # axes are a PartitionSpec, has no such kernel.
    kernel_scale_axes = None if isinstance(kernel_axes, PartitionSpec) else gathered_axes(kernel_axes, mesh)
    return plan_of_dims(mesh, (x_shape, kernel.shape), dims, precision, kernel_scale_axes).without_mesh(lacks_shards)


# A model has few different layers, each of which is traced many times: forward, backward, remat, every microbatch.
@functools.lru_cache(maxsize=4096)
def plan_of_dims(
    mesh: AbstractMesh,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dims: tuple[Dims, Dims, Dims],
    precision: Precision,
    kernel_scale_axes: MeshAxes | None,
) -> Plan:
    """Return the plan of a linear layer whose arrays are placed on a mesh in this way.

    Args:
        mesh: the mesh in use.
        shapes: shapes of the whole input and of the kernel.
        dims: mesh axes for each dimension of input, kernel and output, without axes of size 1, which split nothing.
        precision: precision of the quantizers, the blocks of whose scales must not lie on two devices.
        kernel_scale_axes: mesh axes along which a kernel that was quantized before the call shares its scales. None: no
            kernel is.
    """
    x, kernel, out = dims
    (x_shape, kernel_shape), lead = shapes, len(x) - 1
    rows, features = tuple(map(_common, x[:-1], out[:lead])), out[lead:]
    weights = (x[-1], *features)
    plan = Plan(
        mesh=mesh,
        x_all_gather=beyond(x[:-1], rows),
        out_reduce_scatter=beyond(out[:lead], rows),
        kernel_all_gather=beyond(kernel, weights),
        contracting_axes=x[-1],
        row_axes=flat(rows),
        feature_axes=flat(features),
        x_row_axes=flat(x[:-1]),
        out_row_axes=flat(out[:lead]),
        amax_axes=free_axes(mesh),
        x_spec=partition_spec(x),
        kernel_spec=partition_spec(kernel),
        bias_spec=partition_spec(features),
        out_spec=partition_spec(out),
    )
    # Shards that an all-gather joins have one scale.
    shared = (free_axes(mesh) if precision.of(role).whole_amax else flat(plan.gathered(role)) for role in ROLES)
    plan = replace(plan, scale_axes=tuple(shared))
    # Only an axis that the other operand of a GEMM is split over can be gathered or scattered between the GEMMs:
    # any other would leave devices with shards of different products.
    if (
        len(kernel) != len(weights)
        or tuple(map(_common, kernel, weights)) != weights
        or not set(flat(plan.out_reduce_scatter)) <= set(plan.contracting_axes)
        or not set(flat(plan.x_all_gather)) <= set(plan.feature_axes)
        or not set(flat(plan.kernel_all_gather)) <= set(plan.row_axes)
        or (kernel_scale_axes is not None and set(flat(plan.kernel_all_gather)) != set(kernel_scale_axes))
    ):
        specs = f"input {plan.x_spec}, kernel {plan.kernel_spec} and output {plan.out_spec}"
        return _partitioned(f"{specs} are split in ways that do not go together")
    array_shapes = {"input": x_shape, "kernel": kernel_shape, "output": (*x_shape[:-1], *kernel_shape[1:])}
    for (name, shape), axes in zip(array_shapes.items(), dims, strict=True):
        if reason := indivisible_reason(name, shape, axes, mesh):
            return _partitioned(reason)
    tokens, local_kernel = local_shape(x_shape[:-1], rows, mesh), local_shape(kernel_shape, weights, mesh)
    return replace(plan, rows=tokens).without_mesh(precision.split_misfit(tokens, local_kernel))


def rows_may_be_reordered(first: Plan, last: Plan) -> bool:
    """Return whether the layers of a feed-forward block may run on rows in the order in which devices gather them.

    Only blocks of scales depend on the order of rows in such a block, and along an axis other than the first, such as
    the sequence, XLA transposes the arrays that NCCL gathers and scatters. The rows must come back in the order they
    had.
    """
    come_back_in_order = (first.x_all_gather, first.x_row_axes) == (last.out_reduce_scatter, last.out_row_axes)
    gathered_once = not last.x_all_gather
    along_a_later_axis = any(first.x_all_gather[1:])
    has_rows = prod(first.rows or (0,)) > 0
    return come_back_in_order and gathered_once and along_a_later_axis and has_rows


def row_plan(
    shape: tuple[int, ...],
    axes: LogicalAxes | PartitionSpec | None,
    out_axes: LogicalAxes | PartitionSpec | None,
    *,
    whole: int,
) -> Plan:
    """Return the plan of a row-wise op on ``x`` on the mesh in use.

    Args:
        shape: shape of ``x``.
        axes, out_axes: logical axes of ``x`` and of the output.
        whole: number of trailing dimensions that must be whole on every device.
    """
    mesh = device_mesh()
    if mesh is None:
        return Plan(constrained=current_mesh() is not None)
    if axes is None or out_axes is None:
        return _partitioned("the call does not name the logical axes of its output (out_axes)")
    spec = partition_spec(dims := mesh_dims(axes, mesh))
    # A norm's statistics need whole rows.
    if flat(dims[len(dims) - whole :]):
        return _partitioned(f"its rows are split over devices: {spec}")
    if reason := indivisible_reason("input", shape, dims, mesh):
        return _partitioned(reason)
    return Plan(mesh=mesh, x_row_axes=flat(dims), x_spec=spec, out_spec=logical_to_spec(out_axes, mesh))


def _partitioned(reason: str) -> Plan:
    return Plan(reason=reason, constrained=True)


def beyond(dims: Dims, without: Dims) -> Dims:
    """Return the axes of ``dims`` behind those of ``without``; () for none.

    >>> beyond((("data", "fsdp"), ()), (("data",), ()))
    (('fsdp',), ())
    """
    rest = tuple(axes[len(part) :] for axes, part in zip(dims, without, strict=False))
    return rest if any(rest) else ()


def _common(one: MeshAxes, other: MeshAxes) -> MeshAxes:
    """Return the leading axes that both have."""
    return tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))  # noqa: B905
