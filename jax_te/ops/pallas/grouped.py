"""GEMMs of several linear layers of one shape, each on its own rows, by Hopper's grouped kernels.

The same primitives as `jax_te.ops.xla.grouped`, for operands in 16 bits, and for FP8 with one scale a tensor or one for
each block of 128 values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.pallas.block_quantize import block_quantize, block_quantize_2d
from jax_te.ops.pallas.grouped_gemm import GROUP_ALIGNMENT, BlockScales, grouped_gemm, grouped_gemm_over_rows
from jax_te.ops.pallas.scaled_quantize import scaled_quantize
from jax_te.ops.pallas.support import BLOCK, supported
from jax_te.ops.xla.grouped import GroupedRows, with_shared_scale
from jax_te.ops.xla.grouped import statistics as statistics  # the same here
from jax_te.quantize import BlockQuantizer, Gemm, Precision, Quantization, QuantizedOperand, TensorQuantizer, amax
from jax_te.sharding import Dims, all_gather, device_mesh
from jax_te.typing import Array, DTypeLike

NAME: str = "pallas"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of all groups as the kernels read them.

    Args:
        rows: ``[R, c]``, 16 bits or FP8.
        columns: the same transposed, ``[c, R]``; None for 16 bits, which the kernels read from ``rows``.
        scale_inv: fp32 ``[e]``, for FP8; with a scale for each block of a row ``[c / 128, R]``.
        columns_scale_inv: None, or with a scale for each block of a column ``[R / 128, c]``.
        sizes: ``[e]``, rows of each group with its padding, in fp32: operands of deferred kernel gradients are
            cotangents, among which JAX has no integers.
        dtype: dtype before quantization.
        features: shape of one row.
    """

    rows: Any
    columns: Any
    scale_inv: Any
    columns_scale_inv: Any
    sizes: Any
    dtype: DTypeLike = field(metadata={"static": True})
    features: tuple[int, ...] = field(metadata={"static": True})

    @property
    def group_sizes(self) -> Array:
        """Rows of each group with its padding, int32 ``[e]``."""
        return self.sizes.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Kernels:
    """FP8 kernels of all groups as the kernels of this folder read them.

    Args:
        stored: ``[e, k, n]``, for the input's gradient; None where only forward reads the kernels.
        transposed: ``[e, n, k]``, for forward; None in what backward keeps.
        scale_inv: fp32 ``[e]``, or ``[e, k / 128, n / 128]``.
        features: ``(k, *n)``.
    """

    stored: Any
    transposed: Any
    scale_inv: Any
    features: tuple[int, ...] = field(metadata={"static": True})


def runs_here(
    dtype: DTypeLike, groups: int, tile: int, precision: Precision, *, placed: bool, kernel_all_gather: Dims
) -> bool:
    """Return whether these primitives run a layer: on Hopper GPUs, each of which runs the op by itself.

    Args:
        dtype: the compute dtype.
        groups: number of groups; one alone is a layer, with the numbers and the GEMMs of that layer.
        tile: rows of a tile.
        precision: quantizers of the operands.
        placed: whether devices of a mesh have rows of their own.
        kernel_all_gather: mesh axes along which a kernel ``[e, k, *n]`` is all-gathered.
    """
    return (
        groups > 1
        and (placed or device_mesh() is None)
        and not any(axes for dim, axes in enumerate(kernel_all_gather) if dim != 1)  # all-gathered along k alone
        and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and (_scales_nothing(precision) or _scales_tensors(precision) or _scales_blocks(precision))
        and tile % GROUP_ALIGNMENT == 0
        and supported()[0]
    )


def _scales_nothing(precision: Precision) -> bool:
    """Return whether all operands are in 16 bits."""
    return all(quantizer is None for quantizer in precision.quantizers)


def _scales_tensors(precision: Precision) -> bool:
    """Return whether each operand has one scale for each group.

    A `CustomRecipe` may leave one operand unquantized, and no kernel multiplies FP8 by 16 bits.
    """
    return all(isinstance(quantizer, TensorQuantizer) for quantizer in precision.quantizers)


def _scales_blocks(precision: Precision) -> bool:
    """Return whether rows and gradients have scales for 1 x 128 values, and kernels for 128 x 128."""
    x, kernel, grad = precision.quantizers
    return (
        isinstance(x, BlockQuantizer)
        and isinstance(kernel, BlockQuantizer)
        and isinstance(grad, BlockQuantizer)
        and kernel.two_dimensional
        and not x.two_dimensional
        and not grad.two_dimensional
    )


def quantize_operand(x: GroupedRows | Array, how: Quantization, *, axis: int) -> tuple[Any, Array | None]:
    """Return rows of groups, or each group's kernel ``[e, k, *n]``, as an operand, and the groups' amaxes ``[e]``."""
    how = with_shared_scale(x, how)
    if isinstance(x, GroupedRows):
        return _rows(x, how)
    if how.quantizer is None:
        return x, None
    return _kernels(x, how)


def _rows(x: GroupedRows, how: Quantization) -> tuple[Rows, Array | None]:
    tiles, (count, height, *features) = x.tiles, x.x.shape
    matrix, quantizer = x.x.reshape(count * height, -1), how.quantizer
    columns_scale_inv = None
    if quantizer is None:
        rows, columns, scale_inv, amaxes = matrix, None, None, None
    elif isinstance(quantizer, BlockQuantizer):
        rows, scale_inv, columns, columns_scale_inv = block_quantize(
            matrix, quantizer.dtype, power_of_two=quantizer.power_of_two
        )
        # Blocks first, as the quantizing kernel wrote them and the product reads them.
        scale_inv, columns_scale_inv, amaxes = scale_inv.T, columns_scale_inv.T, None
    else:
        assert isinstance(quantizer, TensorQuantizer)
        # Where scales are given the amaxes are taken in the pass that quantizes.
        seen = tiles.amax(amax(x.x, axis=tuple(range(1, x.x.ndim)))) if quantizer.scaling == "current" else None
        scale = how.scale if seen is None else quantizer.scale_for(seen, None)
        assert scale is not None
        of_blocks = jnp.repeat(scale[tiles.group], height // BLOCK)
        (rows,), (columns,), of_blocks = _quantized(matrix[None], of_blocks[None], quantizer.dtype)
        amaxes = tiles.amax(amax(of_blocks.reshape(count, -1), axis=1)) if seen is None else seen
        scale_inv = 1.0 / scale
    sizes = tiles.sum(jnp.full(count, height, jnp.float32))
    parts = Rows(
        rows=rows,
        columns=columns,
        scale_inv=scale_inv,
        columns_scale_inv=columns_scale_inv,
        sizes=sizes,
        dtype=x.x.dtype,
        features=tuple(features),
    )
    return parts, amaxes


def _kernels(x: Array, how: Quantization) -> tuple[Kernels, Array | None]:
    quantizer, (e, k, *_) = how.quantizer, x.shape
    if isinstance(quantizer, BlockQuantizer):
        stored, transposed, scale_inv = block_quantize_2d(
            x.reshape(e, k, -1), quantizer.dtype, power_of_two=quantizer.power_of_two
        )
        return Kernels(stored=stored, transposed=transposed, scale_inv=scale_inv, features=x.shape[1:]), None
    assert isinstance(quantizer, TensorQuantizer)
    seen = amax(x, axis=tuple(range(1, x.ndim))) if quantizer.scaling == "current" else None
    scale = how.scale if seen is None else quantizer.scale_for(seen, None)
    assert scale is not None
    padded = -(-k // BLOCK)
    stored, transposed, of_blocks = _quantized(
        x.reshape(e, k, -1), jnp.broadcast_to(scale[:, None], (e, padded)), quantizer.dtype
    )
    kernels = Kernels(stored=stored, transposed=transposed, scale_inv=1.0 / scale, features=x.shape[1:])
    return kernels, amax(of_blocks, axis=1) if seen is None else seen


def _quantized(x: Array, scale: Array, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """Return `scaled_quantize` of ``x [e, m, k]``, of any size."""
    _, m, k = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -m % BLOCK), (0, -k % BLOCK))) if m % BLOCK or k % BLOCK else x
    rows, columns, amaxes = scaled_quantize(padded, scale, dtype)
    return rows[:, :m, :k], columns[:, :k, :m], amaxes


def adopt(kernels: QuantizedOperand) -> Kernels:
    """Return kernels that are quantized as plain arrays as these primitives read them."""
    form = kernels.rowwise
    e, *features = form.data.shape
    stored = form.data.reshape(e, features[0], -1)
    return Kernels(
        stored=stored,
        transposed=stored.swapaxes(1, 2),
        scale_inv=form.scale_inv.reshape(e) if form.block is None else form.scale_inv,
        features=tuple(features),
    )


def residual_for_wgrad(x: Rows) -> Rows:
    """Return the form of the rows that the GEMM of the kernels' gradients reads."""
    if x.columns is None:
        return x
    own = x.scale_inv if x.columns_scale_inv is None else None
    return replace(x, rows=None, scale_inv=own)


def residual_for_dgrad(kernels: Any) -> Any:
    """Return the form of the kernels that the GEMM of the input's gradient reads."""
    if isinstance(kernels, QuantizedOperand):
        kernels = adopt(kernels)
    if not isinstance(kernels, Kernels):
        return kernels
    return Kernels(stored=kernels.stored, transposed=None, scale_inv=kernels.scale_inv, features=kernels.features)


def all_gather_kernel(kernels: Any, dims: Dims, gemm: Gemm) -> Any:
    """Return the form of kernels ``[e, k, *n]`` that a GEMM reads, all-gathered along mesh axes of ``k``."""
    if isinstance(kernels, QuantizedOperand):
        kernels = adopt(kernels)
    if not isinstance(kernels, Kernels):
        return all_gather(kernels, dims)
    stored = transposed = None
    if gemm == "fprop":
        transposed = all_gather(kernels.transposed, ((), (), dims[1]))
        k = transposed.shape[2]
    else:
        stored = all_gather(kernels.stored, ((), dims[1]))
        k = stored.shape[1]
    features = (k, *kernels.features[1:])
    return Kernels(stored=stored, transposed=transposed, scale_inv=kernels.scale_inv, features=features)


def gemm_fprop(x: Rows, kernels: Any, bias: Array | None, split_accumulator: bool) -> Array:
    """Return ``x [rows, k] @ kernels [e, k, *n]`` of each row's group, ``[rows, *n]`` in the dtype of ``x``."""
    assert bias is None  # the op adds it, except to padding rows
    if isinstance(kernels, QuantizedOperand):
        kernels = adopt(kernels)
    if isinstance(kernels, Kernels):
        features = kernels.features[1:]
        y = grouped_gemm(
            x.rows,
            kernels.transposed,
            x.group_sizes,
            _scale_of_rows(x, kernels.scale_inv),
            b_transposed=True,
            split_accumulator=split_accumulator,
            out_dtype=x.dtype,
        )
    else:
        features, matrices = kernels.shape[2:], kernels.reshape(*kernels.shape[:2], -1)
        y = grouped_gemm(x.rows, matrices.astype(x.dtype), x.group_sizes, out_dtype=x.dtype)
    return y.reshape(-1, *features)


def _scale_of_rows(rows: Rows, of_kernels: Array) -> Array | BlockScales:
    """Return the inverse scale of the products of rows with kernels whose scales are those of their last axis."""
    return BlockScales(rows.scale_inv, of_kernels) if of_kernels.ndim == 3 else rows.scale_inv * of_kernels


def gemm_dgrad(g: Rows, kernels: Any, split_accumulator: bool) -> Array:
    """Return ``g [rows, *n] @ kernels [e, k, *n]^T`` of each row's group, ``[rows, k]`` in the dtype of ``g``."""
    if isinstance(kernels, Kernels):
        return grouped_gemm(
            g.rows,
            kernels.stored,
            g.group_sizes,
            _scale_of_rows(g, kernels.scale_inv.swapaxes(1, -1) if kernels.scale_inv.ndim == 3 else kernels.scale_inv),
            b_transposed=True,
            split_accumulator=split_accumulator,
            out_dtype=g.dtype,
        )
    matrices = kernels.reshape(*kernels.shape[:2], -1).astype(g.dtype)
    return grouped_gemm(g.rows, matrices, g.group_sizes, b_transposed=True, out_dtype=g.dtype)


def gemm_wgrad(x: Rows, g: Rows, dtype: DTypeLike, split_accumulator: bool) -> Array:
    """Return ``x^T @ g`` of each group's rows, ``[e, k, *n]``, accumulated in fp32 and returned in ``dtype``."""
    if x.columns is None:
        dkernels = grouped_gemm_over_rows(x.rows, g.rows, x.group_sizes, out_dtype=dtype)
    else:
        dkernels = grouped_gemm_over_rows(
            x.columns,
            g.columns,
            x.group_sizes,
            x.scale_inv * g.scale_inv
            if x.columns_scale_inv is None
            else BlockScales(x.columns_scale_inv, g.columns_scale_inv),
            rows_last=True,
            split_accumulator=split_accumulator,
            out_dtype=dtype,
        )
    return dkernels.reshape(*dkernels.shape[:2], *g.features)
