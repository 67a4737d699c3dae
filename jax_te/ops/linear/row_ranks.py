"""How an op that works on each row by itself is split over a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import AbstractMesh

from jax_te.sharding.internal import Layout, layout_of, rank_mesh
from jax_te.typing import LogicalAxes


@dataclass(frozen=True, kw_only=True)
class RowRanks:
    """The mesh, and how an array's rows are split over it. Hashable."""

    mesh: AbstractMesh
    rows: Layout


def row_ranks(shape: tuple[int, ...], axes: LogicalAxes | None, *, whole: int) -> RowRanks | str | None:
    """How an array with these logical axes is split: None without a mesh of several devices, or why it cannot be.

    Args:
        whole: the last so many dimensions must be whole on every device.
    """
    mesh = rank_mesh()
    if mesh is None:
        return None
    if axes is None:
        return "the call does not name the logical axes of its output (out_axes)"
    layout = layout_of(axes, mesh)
    if any(mesh.shape[axis] > 1 for names in layout.dims[len(layout.dims) - whole :] for axis in names):
        return f"its rows are split over devices: {layout.spec}"
    if layout.local_shape(shape, mesh) is None:
        return f"the input {shape} does not divide over {layout.spec} of the mesh {dict(mesh.shape)}"
    return RowRanks(mesh=mesh, rows=layout)
