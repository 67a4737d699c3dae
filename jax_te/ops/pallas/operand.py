"""A linear layer's GEMMs on block-quantized operands, by the kernels of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.pallas.block_gemm import block_gemm
from jax_te.ops.pallas.block_quantize import block_quantize, block_quantize_2d
from jax_te.ops.pallas.support import BLOCK, supported
from jax_te.quantize import BlockQuantizer, QuantizedOperand, QuantizedTensor, Quantizer, as_matrix
from jax_te.sharding import device_mesh
from jax_te.typing import Array, DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockOperand:
    """A tensor with matrix view ``[R, C]`` as Hopper's GEMM reads it: the contracted axis comes last.

    Args:
        rows, rows_scale_inv: ``[R, C]`` for GEMMs that sum over the columns, and its scales.
        columns, columns_scale_inv: ``[C, R]`` for those that sum over the rows. None where no GEMM reads it.
        shape, axis: shape of the tensor, and axis where the columns of its matrix view begin.
        dtype: dtype before quantization.
    """

    rows: Any
    rows_scale_inv: Any
    columns: Any
    columns_scale_inv: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    axis: int = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes of the tensor."""
        return len(self.shape)


def runs_here(quantizer: Quantizer | None) -> bool:
    """Return whether the kernels run this quantization: block scaling, on a Hopper GPU that runs the op by itself."""
    return isinstance(quantizer, BlockQuantizer) and device_mesh() is None and supported()[0]


def quantize_operand(x: Array, quantizer: BlockQuantizer, *, axis: int) -> BlockOperand:
    """Return ``x`` as an operand of both GEMMs that read it, quantized in one pass."""
    axis, matrix = axis % x.ndim, as_matrix(x, axis)
    if quantizer.two_dimensional:
        rows, columns, scale_inv = block_quantize_2d(matrix, quantizer.dtype, power_of_two=quantizer.power_of_two)
        # Square blocks have the same scales in both directions.
        parts = rows, scale_inv, columns, scale_inv.T
    else:
        parts = block_quantize(matrix, quantizer.dtype, power_of_two=quantizer.power_of_two)
    return _operand(*parts, shape=x.shape, axis=axis, dtype=x.dtype)


def adopt(operand: QuantizedOperand) -> BlockOperand:
    """Return a kernel that is stored as plain arrays as an operand."""
    form = operand.rowwise
    # Stored once; wgmma reads FP8 operands only with the contracted axis last, hence the transposed copy.
    rows, scale_inv = as_matrix(form.data, form.axis), form.scale_inv
    return _operand(rows, scale_inv, rows.T, scale_inv.T, shape=form.shape, axis=form.axis, dtype=form.dtype)


def _operand(rows: Any, rows_scale_inv: Any, columns: Any, columns_scale_inv: Any, **static: Any) -> BlockOperand:
    return BlockOperand(
        rows=rows, rows_scale_inv=rows_scale_inv, columns=columns, columns_scale_inv=columns_scale_inv, **static
    )


def residual_for_wgrad(x: BlockOperand) -> BlockOperand:
    """Return the values of the input that the kernel gradient's GEMM reads."""
    return _operand(None, None, x.columns, x.columns_scale_inv, shape=x.shape, axis=x.axis, dtype=x.dtype)


def residual_for_dgrad(kernel: BlockOperand) -> BlockOperand:
    """Return the values of the kernel that the input gradient's GEMM reads."""
    return _operand(kernel.rows, kernel.rows_scale_inv, None, None, shape=kernel.shape, axis=1, dtype=kernel.dtype)


def gemm_fprop(x: BlockOperand, kernel: BlockOperand, bias: Array | None) -> Array:
    """Return ``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
    y = block_gemm(
        x.rows,
        x.rows_scale_inv,
        kernel.columns,
        kernel.columns_scale_inv,
        None if bias is None else bias.reshape(-1),
        out_dtype=x.dtype,
    )
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


def gemm_dgrad(g: BlockOperand, kernel: BlockOperand) -> Array:
    """Return ``g [..., *n] @ kernel [k, *n]^T``, ``[..., k]`` in the dtype of ``g``."""
    dx = block_gemm(g.rows, g.rows_scale_inv, kernel.rows, kernel.rows_scale_inv, out_dtype=g.dtype)
    return dx.reshape(*g.shape[: g.axis], kernel.shape[0])


def gemm_wgrad(x: BlockOperand, g: BlockOperand, dtype: DTypeLike) -> Array:
    """Return ``x [..., k]^T @ g [..., *n]``, ``[k, *n]`` in ``dtype``."""
    dkernel = block_gemm(x.columns, x.columns_scale_inv, g.columns, g.columns_scale_inv, out_dtype=jnp.dtype(dtype))
    return dkernel.reshape(x.shape[-1], *g.shape[g.axis :])


def unpack(x: Any) -> Any:
    """Return a `BlockOperand` as plain arrays, for a GEMM whose other operand is quantized in another way."""
    if not isinstance(x, BlockOperand):
        return x
    rows = columns = None
    if x.rows is not None:
        rows = _tensor(x, x.rows.reshape(x.shape), x.rows_scale_inv, columnwise=False)
    if x.columns is not None:
        columns = _tensor(x, x.columns.T.reshape(x.shape), x.columns_scale_inv.T, columnwise=True)
    return QuantizedOperand(rowwise=rows, columnwise=columns)


def _tensor(x: BlockOperand, data: Array, scale_inv: Array, *, columnwise: bool) -> QuantizedTensor:
    size = prod(x.shape[: x.axis]) if columnwise else prod(x.shape[x.axis :])
    other = data.size // size
    lines = scale_inv.shape[1] if columnwise else scale_inv.shape[0]
    # The number of scales distinguishes 1x128 from 128x128; the operand does not record it.
    across = 1 if lines == other else BLOCK
    block = (BLOCK, across) if columnwise else (across, BLOCK)
    return QuantizedTensor(data=data, scale_inv=scale_inv, dtype=x.dtype, block=block, axis=x.axis)
