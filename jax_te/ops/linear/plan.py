"""How the GEMMs of a linear layer are split over a mesh, and what is communicated between them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jax_te.quantize import (
    ROLES,
    BlockQuantizer,
    GemmState,
    MXQuantizer,
    QuantizedKernel,
    Quantizer,
    TensorQuantizer,
    quantizer_for,
)
from jax_te.quantize.internal import BLOCK, MX_BLOCK, current_observer
from jax_te.recipe import Recipe
from jax_te.sharding.internal import (
    PER_RANK,
    WHOLE,
    Layout,
    MeshAxes,
    RankTree,
    activation_axis,
    layout_of,
    place,
    rank_mesh,
)
from jax_te.typing import Array, LogicalAxes


@dataclass(frozen=True, kw_only=True)
class GemmRanks:
    """``x [..., k] @ kernel [k, *n]`` on the devices of a mesh. Hashable.

    Between the GEMMs, a device has

    - the rows ``rows`` of ``x``: its own, joined along ``x_gather`` (the sequence under sequence parallelism);
    - of the kernel what its parts of ``k`` and ``n`` need, joined along ``kernel_gather`` (fully sharded parameters);
    - a part of the sum over ``k``, where ``k`` is split (row-parallel layers): the output is summed over ``inner``, and
      scattered along ``out_scatter`` where the output is split more finely than the rows.

    Backward is the transpose of each.
    """

    mesh: AbstractMesh
    x: Layout
    kernel: Layout
    out: Layout

    @property
    def lead(self) -> int:
        """Number of axes of ``x`` before the last one."""
        return len(self.x.dims) - 1

    @property
    def rows(self) -> tuple[MeshAxes, ...]:
        """Mesh axes of each leading dimension while the GEMMs run."""
        return tuple(_common(x, out) for x, out in zip(self.x.dims[:-1], self.out.dims[: self.lead], strict=True))

    @property
    def x_gather(self) -> tuple[MeshAxes, ...]:
        """What ``x`` is joined along, for each leading dimension."""
        return self._rest(self.x.dims[:-1], self.rows)

    @property
    def out_scatter(self) -> tuple[MeshAxes, ...]:
        """What the output's sum is scattered along, for each leading dimension."""
        return self._rest(self.out.dims[: self.lead], self.rows)

    @property
    def inner(self) -> MeshAxes:
        """Mesh axes that split the sum over ``k``."""
        return self._rest(self.x.dims[-1:], ((),))[0]

    @property
    def features(self) -> tuple[MeshAxes, ...]:
        """Mesh axes of each output feature dimension, as for a bias."""
        return self.out.dims[self.lead :]

    @property
    def kernel_gather(self) -> tuple[MeshAxes, ...]:
        """What the kernel is joined along, for each of its dimensions."""
        return self._rest(self.kernel.dims, (self.x.dims[-1], *self.features))

    def _rest(self, dims: tuple[MeshAxes, ...], without: tuple[MeshAxes, ...]) -> tuple[MeshAxes, ...]:
        """Axes of ``dims`` behind those of ``without``, if they have more than one device."""
        pairs = zip(dims, without, strict=True)
        return tuple(tuple(a for a in axes[len(part) :] if self.mesh.shape[a] > 1) for axes, part in pairs)

    @property
    def bias(self) -> Layout:
        """Layout of a bias ``[*n]``."""
        return Layout(self.features)


def gemm_ranks(
    x_shape: tuple[int, ...],
    kernel: Array | QuantizedKernel,
    *,
    x_axes: LogicalAxes | None,
    kernel_axes: LogicalAxes | None,
    out_axes: LogicalAxes | None,
    recipe: Recipe | None,
    state: GemmState | None = None,
) -> GemmRanks | str | None:
    """How a linear layer is split over the mesh in use: None without a mesh of several devices, or why it cannot be.

    Args:
        x_shape: of the whole input.
        kernel: ``[k, *n]``.
        x_axes: logical axes of ``x``; None: those that ``out_axes`` and ``kernel_axes`` leave no choice about.
        kernel_axes, out_axes: logical axes of the kernel and of the output.
        recipe: what quantizes the operands: blocks of the scales must not lie on two devices.
        state: its state, if it has any.
    """
    mesh = rank_mesh()
    if mesh is None:
        return None
    if out_axes is None or kernel_axes is None:
        return "the call does not name the logical axes of its output and kernel (out_axes, kernel_axes)"
    if current_observer() is not None:
        return "its quantized tensors are observed, which is done on whole arrays"
    if state is not None and state["x"]["scale"].ndim > 0:
        return "each part of the batch has scales of its own (tp_only_amax_red)"
    lead = len(x_shape) - 1
    if x_axes is None:
        x_axes = (*out_axes[:lead], activation_axis(kernel_axes[0]))
    ranks = GemmRanks(
        mesh=mesh, x=layout_of(x_axes, mesh), kernel=layout_of(kernel_axes, mesh), out=layout_of(out_axes, mesh)
    )
    why_not = _layouts_disagree(ranks)
    if why_not is not None:
        return why_not
    for name, shape, layout in (
        ("input", x_shape, ranks.x),
        ("kernel", kernel.shape, ranks.kernel),
        ("output", (*x_shape[:-1], *kernel.shape[1:]), ranks.out),
    ):
        if layout.local_shape(shape, mesh) is None:
            return f"the {name} {shape} does not divide over {layout.spec} of the mesh {dict(mesh.shape)}"
    return _kernel_disagrees(kernel) or _scales_disagree(ranks, x_shape, kernel.shape, recipe) or ranks


def norm_ranks(ranks: GemmRanks | str | None) -> GemmRanks | str | None:
    """The same for a linear layer behind a norm, which needs whole rows of the input."""
    if isinstance(ranks, GemmRanks) and ranks.inner:
        return f"the norm's input is split along its features, {ranks.x.spec}"
    return ranks


def kernel_layout(kernel: Array | QuantizedKernel, layout: Layout) -> Any:
    """``layout`` for all of a kernel's arrays: what has its shape is split like it, and there is one scale."""
    if not isinstance(kernel, QuantizedKernel):
        return layout
    if kernel.is_packed:
        form: Any = PER_RANK
    else:
        form = jax.tree.map(lambda leaf: layout if leaf.shape == kernel.shape else WHOLE, kernel.form)
    return dataclasses.replace(kernel, form=form, amax=None if kernel.amax is None else WHOLE)


def place_linear(
    ranks: GemmRanks, kernel: Array | QuantizedKernel, bias: Array | None, state: GemmState | None
) -> tuple[Array | QuantizedKernel, Array | None, GemmState | None]:
    """What a linear layer reads beside its input, split as its layouts say; a kernel that is quantized is already."""
    mesh = ranks.mesh
    if not isinstance(kernel, QuantizedKernel):
        kernel = place(kernel, ranks.kernel, mesh)
    return kernel, place(bias, ranks.bias, mesh), place(state, WHOLE, mesh)


def _common(one: MeshAxes, other: MeshAxes) -> MeshAxes:
    """The leading axes that both have."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def _layouts_disagree(ranks: GemmRanks) -> str | None:
    """Why the collectives between these layouts are none of `GemmRanks`, or None."""
    x, kernel, out = ranks.x, ranks.kernel, ranks.out
    needed = (x.dims[-1], *ranks.features)
    split = tuple(axis for axes in ranks.features for axis in axes)
    rows = tuple(axis for axes in ranks.rows for axis in axes)
    fits = (
        len(kernel.dims) == 1 + len(ranks.features)
        and all(axes[: len(part)] == part for axes, part in zip(kernel.dims, needed, strict=True))
        and all(axis in ranks.inner for axes in ranks.out_scatter for axis in axes)
        and all(axis in split for axes in ranks.x_gather for axis in axes)
        and all(axis in rows for axes in ranks.kernel_gather for axis in axes)
    )
    if fits:
        return None
    return f"input {x.spec}, kernel {kernel.spec} and output {out.spec} are split in ways that do not go together"


def _kernel_disagrees(kernel: Array | QuantizedKernel) -> str | None:
    """Why a kernel that was quantized beforehand has no parts for the devices, or None."""
    if not isinstance(kernel, QuantizedKernel) or isinstance(kernel.form, RankTree):
        return None
    if kernel.is_packed:
        return "its kernel was quantized as a whole, for one device"
    return None if isinstance(kernel.quantizer, TensorQuantizer) else "its kernel was quantized in blocks as a whole"


def _scales_disagree(
    ranks: GemmRanks, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], recipe: Recipe | None
) -> str | None:
    """Why quantizing the parts is not quantizing the whole, or None."""
    quantizers = [quantizer_for(recipe, role) for role in ROLES]
    if all(quantizer is None or isinstance(quantizer, TensorQuantizer) for quantizer in quantizers):
        return None
    assert recipe is not None
    if not all(quantizer is None or isinstance(quantizer, _BY_PART) for quantizer in quantizers):
        return f"recipe {recipe.name!r} has scales of the whole tensor beside those of its blocks"
    multiple = max(_block(quantizer) for quantizer in quantizers)
    rows = Layout(ranks.rows).local_shape(x_shape[:-1], ranks.mesh)
    kernel = Layout((ranks.x.dims[-1], *ranks.features)).local_shape(kernel_shape, ranks.mesh)
    assert rows is not None
    assert kernel is not None
    sizes = {"tokens in a row": rows[-1] if rows else 1, "input size": kernel[0], "output size": kernel[-1]}
    for name, size in sizes.items():
        if size % multiple:
            return f"{name} of one device, {size}, is no multiple of the {multiple} values of a scale"
    return None


_BY_PART = (TensorQuantizer, BlockQuantizer, MXQuantizer)
"""Quantizers that need no more of the rest of a tensor than its amax."""


def _block(quantizer: Quantizer | None) -> int:
    return BLOCK if isinstance(quantizer, BlockQuantizer) else MX_BLOCK if isinstance(quantizer, MXQuantizer) else 1
