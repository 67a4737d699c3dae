"""Placement of a mixture's tokens, experts and rows on the devices of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, PartitionSpec

from jax_te.ops.linear.plan import Plan, beyond
from jax_te.ops.sharded_vjp import Shards
from jax_te.quantize import Precision, TensorRole, ambient_observer
from jax_te.sharding import (
    Dims,
    MeshAxes,
    activation_axis,
    device_mesh,
    flat,
    free_axes,
    indivisible_reason,
    mesh_dims,
    partition_spec,
)
from jax_te.typing import LogicalAxes


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Mesh axes of a mixture's tokens and experts. Hashable.

    Each device has the rows of its own experts, from the tokens of all devices along ``experts``. An array of rows
    ``[d r, ...]`` has the ``r`` rows of each of ``d`` devices, one device after another.

    Args:
        mesh: the mesh in use.
        tokens: mesh axes for each leading axis of the tokens ``[b, s, h]``.
        experts: mesh axes that split the experts, among those of the tokens.
        features: mesh axes that split the features between an expert's two layers. Their devices hold the same rows;
            outputs of the second layer, and gradients of the first one's input, are their summands.
    """

    mesh: AbstractMesh
    tokens: Dims
    experts: MeshAxes
    features: MeshAxes

    @property
    def rows(self) -> MeshAxes:
        """Mesh axes of the devices whose rows are separate parts of an array of rows."""
        return tuple(dict.fromkeys((*flat(self.tokens), *self.features)))

    @property
    def devices(self) -> int:
        """Number of devices whose rows are separate parts of an array of rows, ``d``."""
        return self.size(self.rows)

    @property
    def row_spec(self) -> PartitionSpec:
        """PartitionSpec of an array of rows."""
        return PartitionSpec(self.rows or None)

    @property
    def token_spec(self) -> PartitionSpec:
        """PartitionSpec of an array of tokens."""
        return partition_spec(self.tokens)

    @property
    def copied(self) -> MeshAxes:
        """Mesh axes of devices that hold the same rows, and different tokens outside of the experts."""
        return tuple(axis for axis in self.features if axis in flat(self.tokens))

    def size(self, axes: MeshAxes) -> int:
        """Return the number of devices along mesh axes."""
        return prod(self.mesh.shape[axis] for axis in axes)

    def shards(self, args: Any, out: Any) -> Shards:
        """Return the sharding of an op's arrays, whose cotangents are sharded like the arguments."""
        return Shards(mesh=self.mesh, args=args, out=out, cotangents=args)

    def parts(self, kernel_axes: LogicalAxes | PartitionSpec) -> tuple[int, ...]:
        """Return the number of devices among which each axis of a kernel ``[e, k, *n]`` is split in its GEMMs."""
        return tuple(map(self.size, self._used(kernel_axes)))

    def _used(self, kernel_axes: LogicalAxes | PartitionSpec) -> Dims:
        """Return the mesh axes along which a kernel stays split in its GEMMs."""
        return mesh_dims(tuple(map(activation_axis, kernel_axes)), self.mesh)

    def plan(self, kernel_axes: LogicalAxes | PartitionSpec, precision: Precision) -> Plan:
        """Return the plan of experts' linear layer, ``x [rows, k] @ kernel [e, k, *n]``, on each device's rows.

        A kernel that is sharded along other axes than ``experts`` and ``features`` is all-gathered.
        """
        kernel, used = mesh_dims(kernel_axes, self.mesh), self._used(kernel_axes)
        gathered = beyond(kernel, used)
        rows = tuple(axis for axis in self.rows if axis not in flat(used))
        # An expert's rows may be on any device that does not have other experts.
        shared = tuple(axis for axis in free_axes(self.mesh) if axis not in self.experts)
        joined: dict[TensorRole, MeshAxes] = {"x": (), "kernel": flat(gathered), "grad": ()}
        scales = (shared if precision.of(role).whole_amax else axes for role, axes in joined.items())
        return Plan(
            mesh=self.mesh,
            kernel_all_gather=gathered,
            row_axes=rows,
            out_row_axes=rows,
            amax_axes=shared,
            scale_axes=tuple(scales),
            x_spec=self.row_spec,
            kernel_spec=partition_spec(kernel),
            bias_spec=partition_spec((used[0], *used[2:])),
            out_spec=self.row_spec,
        )


class PlacementChoice(NamedTuple):
    """The placement of a mixture on the mesh in use, or the reason why there is none; without a mesh neither."""

    placement: ExpertPlacement | None = None
    reason: str | None = None


def expert_placement(
    shape: tuple[int, ...], kernels: tuple[tuple[tuple[int, ...], LogicalAxes], ...], *, sequence_parallel: bool
) -> PlacementChoice:
    """Return the placement of a mixture on the mesh in use, or the reason why there is none.

    Args:
        shape: shape of the tokens ``[b, s, h]``, or ``[s, h]``.
        kernels: shape and logical axes of the experts' kernels, ``[e, k, *n]``.
        sequence_parallel: whether tokens are sharded over the tensor axis along the sequence.

    Raises:
        ValueError: if the experts are split over an axis that does not split the tokens.
    """
    mesh = device_mesh()
    if mesh is None:
        return PlacementChoice()
    if ambient_observer.value is not None:
        return PlacementChoice(reason="quantized tensors are observed, which is done on whole arrays")

    def tokens_along(sequence: str) -> Dims:
        return mesh_dims(("batch", sequence, None)[: len(shape) - 1], mesh)

    used = [mesh_dims(tuple(map(activation_axis, axes)), mesh) for _, axes in kernels]
    experts = used[0][0]
    features = tuple(dict.fromkeys(axis for dims in used for axis in flat(dims[1:])))
    tokens = tokens_along("sequence_parallel" if sequence_parallel else "sequence")
    if not set(experts) <= set(flat(tokens)):
        tokens = tokens_along("sequence_parallel")
    if missing := [axis for axis in experts if axis not in flat(tokens)]:
        raise ValueError(
            f"experts are split over mesh axis {missing[0]!r}, which does not split tokens {list(shape[:-1])}: name it "
            "in the rule of 'batch', or leave it out of that of 'expert' (use_rules(ShardingRules(...)))"
        )
    arrays = [
        ("batch of tokens", shape[:-1], tokens),
        *(("kernel", size, mesh_dims(axes, mesh)) for size, axes in kernels),
    ]
    for name, size, dims in arrays:
        if reason := indivisible_reason(name, size, dims, mesh):
            return PlacementChoice(reason=reason)
    return PlacementChoice(ExpertPlacement(mesh=mesh, tokens=tokens, experts=experts, features=features))
