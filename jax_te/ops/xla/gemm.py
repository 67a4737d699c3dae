"""GEMMs of a linear layer and the quantization of their operands, in plain JAX.

Where the kernels of `jax_te.ops.pallas` run, block scaling is theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_te.ops.pallas import BlockOperand
from jax_te.ops.pallas import operand as hopper
from jax_te.ops.pallas.support import BLOCK
from jax_te.quantize import BlockQuantizer, Operand, QuantizedOperand, QuantizedTensor, Quantizer, with_scale
from jax_te.quantize import quantize_operand as quantize_both
from jax_te.sharding.internal import MeshAxes, gather
from jax_te.typing import Array, DTypeLike

Reduce = Callable[[Array], Array]


def quantize_operand(
    x: Array, quantizer: Quantizer | None, scale: Array | None, *, axis: int, reduce: Reduce | None = None
) -> tuple[Operand, Array | None]:
    """``x`` quantized for its two GEMMs, rows ending at ``axis``, and its amax; without a quantizer ``x`` and None.

    Where ``x`` is one device's part of a tensor, ``reduce`` makes its amax that of the tensor.
    """
    quantizer, scale = with_scale(x, quantizer, scale, reduce)
    if quantizer is None:
        return x, None
    if isinstance(quantizer, BlockQuantizer) and hopper.runs_here(quantizer):
        return hopper.quantize_operand(x, quantizer, axis=axis), None
    return quantize_both(x, quantizer, scale, axis=axis)


def sum_rows(g: Array, axis: int, dtype: DTypeLike) -> Array:
    """Sum in fp32 over the axes before ``axis``: a bias gradient."""
    return jnp.sum(g, axis=tuple(range(axis)), dtype=jnp.float32).astype(dtype)


def quantize_dbias(
    g: Array,
    quantizer: Quantizer | None,
    scale: Array | None,
    *,
    axis: int,
    bias_dtype: DTypeLike | None,
    reduce: Reduce | None = None,
) -> tuple[Operand, Array | None, Array | None]:
    """The output gradient as an operand, the bias gradient (None for ``bias_dtype`` None), the amax."""
    dbias = None if bias_dtype is None else sum_rows(g, axis, bias_dtype)
    operand, g_amax = quantize_operand(g, quantizer, scale, axis=axis, reduce=reduce)
    return operand, dbias, g_amax


def gather_rows(operand: Operand, dims: tuple[MeshAxes, ...]) -> Operand:
    """An operand with one scale, joined with other devices' parts along mesh axes of each leading dimension."""
    if not isinstance(operand, QuantizedOperand):
        return gather(operand, dims)
    form = operand.rowwise
    return QuantizedOperand(rowwise=dataclasses.replace(form, data=gather(form.data, dims)), columnwise=None)


def gather_kernel(kernel: Operand, dims: tuple[MeshAxes, ...], gemm: str) -> Operand:
    """A kernel with one scale, joined likewise, for one GEMM, ``"fprop"`` or ``"dgrad"``."""
    return gather_rows(kernel, dims)


def keep_x(x: Operand) -> Operand:
    """What backward needs of the input: the form whose rows are summed over."""
    if isinstance(x, BlockOperand):
        return hopper.keep_x(x)
    return QuantizedOperand(rowwise=None, columnwise=_form(x, "rows")) if isinstance(x, QuantizedOperand) else x


def keep_kernel(kernel: Operand) -> Operand:
    """What backward needs of the kernel: the form whose columns are summed over."""
    if isinstance(kernel, BlockOperand):
        return hopper.keep_kernel(kernel)
    return QuantizedOperand(rowwise=kernel.rowwise, columnwise=None) if isinstance(kernel, QuantizedOperand) else kernel


def _form(operand: Operand, summed: str) -> Array | QuantizedTensor:
    """The form of an operand whose ``"rows"`` or ``"columns"`` are summed over."""
    if not isinstance(operand, QuantizedOperand):
        return operand
    form = operand.rowwise if summed == "columns" or operand.columnwise is None else operand.columnwise
    assert form is not None
    assert summed == "columns" or form is operand.columnwise or form.serves_both
    return form


def _dtype(operand: Operand) -> DTypeLike:
    if not isinstance(operand, QuantizedOperand):
        return operand.dtype
    return (operand.columnwise if operand.rowwise is None else operand.rowwise).dtype


def _is_blocked(kernel: QuantizedOperand) -> bool:
    """Whether a kernel held as plain arrays has the 128 x 128 blocks that the Pallas kernels read."""
    return kernel.rowwise is not None and kernel.rowwise.block == (BLOCK, BLOCK)


Contract = tuple[tuple[int, ...], tuple[int, ...]]


def _dot(
    lhs: Array | QuantizedTensor, rhs: Array | QuantizedTensor, contract: Contract, dtype: DTypeLike, precise: bool
) -> Array:
    dims = (contract, ((), ()))
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        if lhs.parts:
            return _dot_parts(lhs, rhs, contract).astype(dtype)
        if lhs.block is None and rhs.block is None:
            # The FP8 product is accumulated and scaled in fp32 and rounded once, as FP8 GEMM units do.
            precision = jax.lax.Precision.HIGHEST if precise else jax.lax.Precision.DEFAULT
            product = jax.lax.dot_general(
                lhs.data, rhs.data, dims, precision=precision, preferred_element_type=jnp.float32
            )
            return (product * (lhs.scale_inv * rhs.scale_inv)).astype(dtype)
        # Products of the values are exact in fp32: what remains is the order of the sum.
        left, right = (lhs.values(), rhs.values()) if lhs.rotated == rhs.rotated else (_wide(lhs), _wide(rhs))
        product = jax.lax.dot_general(left, right, dims, precision="highest", preferred_element_type=jnp.float32)
        return product.astype(dtype)
    left, right = (side.dequantize() if isinstance(side, QuantizedTensor) else side for side in (lhs, rhs))
    compute = left.dtype if isinstance(rhs, QuantizedTensor) else right.dtype
    if jnp.dtype(dtype) == jnp.float32 and jax.default_backend() == "cpu":
        compute = jnp.dtype(jnp.float32)  # XLA's CPU dot has no half-precision operands with an fp32 result
    left, right = left.astype(compute), right.astype(compute)
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.dtype(dtype))


def _dot_parts(lhs: QuantizedTensor, rhs: QuantizedTensor, contract: Contract) -> Array:
    """A product in FP8 where each part of the batch has its own scales, fp32."""
    split = lhs.data.reshape(lhs.parts, -1, *lhs.shape[1:])
    scales = lhs.scale_inv * rhs.scale_inv
    if not rhs.parts:  # the batch is no axis of the kernel: scale the rows of the result
        dims = ((tuple(axis + 1 for axis in contract[0]), contract[1]), ((), ()))
        product = jax.lax.dot_general(split, rhs.data, dims, preferred_element_type=jnp.float32)
        product = product * scales.reshape(-1, *(1,) * (product.ndim - 1))
        return product.reshape(-1, *product.shape[2:])
    other = rhs.data.reshape(rhs.parts, -1, *rhs.shape[1:])
    rows, other_rows = (tuple(axis + 1 for axis in side) for side in contract)
    dims = ((rows, other_rows), ((0,), (0,)))
    product = jax.lax.dot_general(split, other, dims, preferred_element_type=jnp.float32)
    return jnp.sum(product * scales.reshape(-1, *(1,) * (product.ndim - 1)), axis=0)


def _wide(x: QuantizedTensor) -> Array:
    return dataclasses.replace(x, dtype=jnp.float32).dequantize()


def gemm_fprop(x: Operand, kernel: Operand, bias: Array | None, precise: bool) -> Array:
    """``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
    if isinstance(x, BlockOperand) and isinstance(kernel, QuantizedOperand) and _is_blocked(kernel):
        kernel = hopper.adopt(kernel)
    if isinstance(x, BlockOperand) and isinstance(kernel, BlockOperand):
        return hopper.gemm_fprop(x, kernel, bias)
    x, kernel = hopper.unpack(x), hopper.unpack(kernel)
    if not isinstance(kernel, QuantizedOperand):
        kernel = kernel.astype(_dtype(x))
    y = _dot(_form(x, "columns"), _form(kernel, "rows"), ((x.ndim - 1,), (0,)), _dtype(x), precise)
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))


def gemm_dgrad(g: Operand, kernel: Operand, precise: bool) -> Array:
    """``g [..., *n] @ kernel [k, *n]^T`` -> ``[..., k]`` in the dtype of ``g``."""
    if isinstance(g, BlockOperand) and isinstance(kernel, QuantizedOperand) and _is_blocked(kernel):
        kernel = hopper.adopt(kernel)
    if isinstance(g, BlockOperand) and isinstance(kernel, BlockOperand):
        return hopper.gemm_dgrad(g, kernel)
    g, kernel = hopper.unpack(g), hopper.unpack(kernel)
    if not isinstance(kernel, QuantizedOperand):
        kernel = kernel.astype(_dtype(g))
    out_axes = kernel.ndim - 1
    contract = (tuple(range(g.ndim - out_axes, g.ndim)), tuple(range(1, kernel.ndim)))
    return _dot(_form(g, "columns"), _form(kernel, "columns"), contract, _dtype(g), precise)


def gemm_wgrad(x: Operand, g: Operand, dtype: DTypeLike, precise: bool) -> Array:
    """``x [..., k]^T @ g [..., *n]`` -> ``[k, *n]``, accumulated in fp32 and given in ``dtype``."""
    if isinstance(x, BlockOperand) and isinstance(g, BlockOperand):
        return hopper.gemm_wgrad(x, g, dtype)
    x, g = hopper.unpack(x), hopper.unpack(g)
    rows = tuple(range(x.ndim - 1))
    return _dot(_form(x, "rows"), _form(g, "rows"), (rows, rows), dtype, precise)
