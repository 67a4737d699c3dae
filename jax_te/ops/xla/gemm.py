"""GEMMs of a linear layer and the quantization of their operands, in plain JAX.

Where the kernels of `jax_te.ops.pallas` run, they compute block scaling.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jax_te._device import default_platform
from jax_te.ops.pallas import BlockOperand
from jax_te.ops.pallas import operand as hopper
from jax_te.ops.pallas.support import BLOCK
from jax_te.ops.wide import wide_dtype
from jax_te.quantize import (
    BlockQuantizer,
    Gemm,
    Operand,
    Quantization,
    QuantizedOperand,
    QuantizedTensor,
    quantization_statistics,
)
from jax_te.quantize import quantize_operand as quantize_both
from jax_te.sharding import Dims, all_gather
from jax_te.typing import Array, DTypeLike


def quantize_operand(x: Array, how: Quantization, *, axis: int) -> tuple[Operand, Array | None]:
    """Return ``x`` as an operand, and its amax; see `jax_te.ops.primitives.Backend`."""
    if how.quantizer is None:
        return x, None
    quantizer, scale, _ = how if how.amax_axes is None else how.of_shard(x)
    assert quantizer is not None
    if isinstance(quantizer, BlockQuantizer) and hopper.runs_here(quantizer):
        return hopper.quantize_operand(x, quantizer, axis=axis), None
    return quantize_both(x, quantizer, scale, axis=axis)


def statistics(x: Array, how: Quantization, *, axis: int) -> dict[str, Array]:
    """Return statistics of the quantization of ``x``; see `jax_te.ops.primitives.Backend`."""
    assert how.quantizer is not None
    return quantization_statistics(x, how.quantizer, how.scale, axis=axis)


def sum_rows(g: Array, axis: int, dtype: DTypeLike) -> Array:
    """Return the sum over the axes before ``axis``, accumulated in fp32 (of fp64: fp64): a bias gradient."""
    return jnp.sum(g, axis=tuple(range(axis)), dtype=wide_dtype(g.dtype)).astype(dtype)


def quantize_dbias(
    g: Array, how: Quantization, *, axis: int, bias_dtype: DTypeLike | None
) -> tuple[Operand, Array | None, Array | None]:
    """Return the output's gradient as an operand, the bias gradient, the amax; see `jax_te.ops.primitives.Backend`."""
    dbias = None if bias_dtype is None else sum_rows(g, axis, bias_dtype)
    operand, g_amax = quantize_operand(g, how, axis=axis)
    return operand, dbias, g_amax


def all_gather_operand(operand: Operand, dims: Dims) -> Operand:
    """Return an operand with one scale, all-gathered along mesh axes of each leading dimension."""
    if not isinstance(operand, QuantizedOperand):
        return all_gather(operand, dims)
    form = operand.rowwise
    return QuantizedOperand(rowwise=dataclasses.replace(form, data=all_gather(form.data, dims)), columnwise=None)


def all_gather_kernel(kernel: Operand, dims: Dims, gemm: Gemm) -> Operand:
    """Return a kernel with one scale all-gathered; ``xla`` stores one form for both GEMMs."""
    return all_gather_operand(kernel, dims)


def residual_for_wgrad(x: Operand) -> Operand:
    """Return the form of the input whose rows are summed over."""
    if isinstance(x, BlockOperand):
        return hopper.residual_for_wgrad(x)
    return QuantizedOperand(rowwise=None, columnwise=_form(x, "rows")) if isinstance(x, QuantizedOperand) else x


def residual_for_dgrad(kernel: Operand) -> Operand:
    """Return the form of the kernel whose columns are summed over."""
    if isinstance(kernel, BlockOperand):
        return hopper.residual_for_dgrad(kernel)
    return QuantizedOperand(rowwise=kernel.rowwise, columnwise=None) if isinstance(kernel, QuantizedOperand) else kernel


def _form(operand: Operand, summed: Literal["rows", "columns"]) -> Array | QuantizedTensor:
    """Return the form of an operand whose ``"rows"`` or ``"columns"`` are summed over."""
    if isinstance(operand, BlockOperand):
        operand = hopper.unpack(operand)
    if not isinstance(operand, QuantizedOperand):
        return operand
    form = operand.rowwise if summed == "columns" or operand.columnwise is None else operand.columnwise
    assert form is not None
    assert summed == "columns" or form is operand.columnwise or form.block is None or form.block[0] == form.block[1]
    return form


def _adopted(kernel: Operand) -> Operand:
    """Return a kernel stored as plain arrays, in the 128 x 128 blocks of the Pallas kernels, as their operand."""
    if isinstance(kernel, QuantizedOperand) and kernel.rowwise is not None and kernel.rowwise.block == (BLOCK, BLOCK):
        return hopper.adopt(kernel)
    return kernel


Contract = tuple[tuple[int, ...], tuple[int, ...]]


def _dot(
    lhs: Array | QuantizedTensor,
    rhs: Array | QuantizedTensor,
    contract: Contract,
    dtype: DTypeLike,
    split_accumulator: bool,
) -> Array:
    dims = (contract, ((), ()))
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        # Any precision other than DEFAULT disables the tensor cores' fast accumulation.
        precision = jax.lax.Precision.HIGHEST if split_accumulator else jax.lax.Precision.DEFAULT
        if lhs.parts:
            return _dot_parts(lhs, rhs, contract, precision).astype(dtype)
        if lhs.block is None and rhs.block is None:
            # The FP8 product is accumulated and scaled in fp32 and rounded once, as FP8 GEMM units do.
            product = jax.lax.dot_general(
                lhs.data, rhs.data, dims, precision=precision, preferred_element_type=jnp.float32
            )
            return (product * (lhs.scale_inv * rhs.scale_inv)).astype(dtype)
        # Products of the values are exact in fp32: only the order of the sum can differ.
        left, right = (lhs.values(), rhs.values()) if lhs.rotated == rhs.rotated else (_wide(lhs), _wide(rhs))
        product = jax.lax.dot_general(left, right, dims, precision="highest", preferred_element_type=jnp.float32)
        return product.astype(dtype)
    left = lhs.dequantize() if isinstance(lhs, QuantizedTensor) else lhs
    right = rhs.dequantize() if isinstance(rhs, QuantizedTensor) else rhs
    compute = left.dtype if isinstance(rhs, QuantizedTensor) else right.dtype
    if compute == jnp.float64:
        # Rounded afterwards, as to an fp32 kernel's gradient: JAX has no products that are narrower than fp64 operands.
        return jax.lax.dot_general(left.astype(compute), right.astype(compute), dims).astype(dtype)
    if jnp.dtype(dtype) == jnp.float32 and default_platform() == "cpu":
        compute = jnp.dtype(jnp.float32)  # XLA's CPU dot has no half-precision operands with an fp32 result
    left, right = left.astype(compute), right.astype(compute)
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.dtype(dtype))


def _dot_parts(lhs: QuantizedTensor, rhs: QuantizedTensor, contract: Contract, precision: jax.lax.Precision) -> Array:
    """Return a product in FP8 where each part of the batch has its own scales, fp32."""
    split = lhs.data.reshape(lhs.parts, -1, *lhs.shape[1:])
    scales = lhs.scale_inv * rhs.scale_inv
    if not rhs.parts:  # the batch is not an axis of the kernel: scale the rows of the result
        dims = ((tuple(axis + 1 for axis in contract[0]), contract[1]), ((), ()))
        product = jax.lax.dot_general(split, rhs.data, dims, precision=precision, preferred_element_type=jnp.float32)
        product = product * scales.reshape(-1, *(1,) * (product.ndim - 1))
        return product.reshape(-1, *product.shape[2:])
    other = rhs.data.reshape(rhs.parts, -1, *rhs.shape[1:])
    rows, other_rows = (tuple(axis + 1 for axis in side) for side in contract)
    dims = ((rows, other_rows), ((0,), (0,)))
    product = jax.lax.dot_general(split, other, dims, precision=precision, preferred_element_type=jnp.float32)
    return jnp.sum(product * scales.reshape(-1, *(1,) * (product.ndim - 1)), axis=0)


def _wide(x: QuantizedTensor) -> Array:
    return dataclasses.replace(x, dtype=jnp.float32).dequantize()


def gemm_fprop(x: Operand, kernel: Operand, bias: Array | None, split_accumulator: bool) -> Array:
    """Return ``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
    if isinstance(x, BlockOperand):
        kernel = _adopted(kernel)
        if isinstance(kernel, BlockOperand):
            return hopper.gemm_fprop(x, kernel, bias)
    lhs, rhs = _form(x, "columns"), _form(kernel, "rows")
    if not isinstance(rhs, QuantizedTensor):
        rhs = rhs.astype(lhs.dtype)
    y = _dot(lhs, rhs, ((lhs.ndim - 1,), (0,)), lhs.dtype, split_accumulator)
    return y if bias is None else y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))


def gemm_dgrad(g: Operand, kernel: Operand, split_accumulator: bool) -> Array:
    """Return ``g [..., *n] @ kernel [k, *n]^T``, ``[..., k]`` in the dtype of ``g``."""
    if isinstance(g, BlockOperand):
        kernel = _adopted(kernel)
        if isinstance(kernel, BlockOperand):
            return hopper.gemm_dgrad(g, kernel)
    lhs, rhs = _form(g, "columns"), _form(kernel, "columns")
    if not isinstance(rhs, QuantizedTensor):
        rhs = rhs.astype(lhs.dtype)
    rank, kernel_rank = lhs.ndim, rhs.ndim
    contract = (tuple(range(rank - kernel_rank + 1, rank)), tuple(range(1, kernel_rank)))
    return _dot(lhs, rhs, contract, lhs.dtype, split_accumulator)


def gemm_wgrad(x: Operand, g: Operand, dtype: DTypeLike, split_accumulator: bool) -> Array:
    """Return ``x [..., k]^T @ g [..., *n]``, ``[k, *n]``, accumulated in fp32 and returned in ``dtype``."""
    if isinstance(x, BlockOperand) and isinstance(g, BlockOperand):
        return hopper.gemm_wgrad(x, g, dtype)
    lhs = _form(x, "rows")
    rows = tuple(range(lhs.ndim - 1))
    return _dot(lhs, _form(g, "rows"), (rows, rows), dtype, split_accumulator)
