"""GEMMs of a linear layer and the quantization of their operands, by Transformer Engine.

An operand is TE's own tensor object: rowwise and transposed copies with one scale, or a plain array in a wrapper.
Tensors that TE does not quantize are jax_te's `QuantizedOperand`, and their GEMMs are those of the ``xla`` backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.jax.cpp_extensions.amax import AmaxScope, calculate_amax
from transformer_engine.jax.cpp_extensions.gemm import CollectiveOp, GemmPrimitive, _te_gemm
from transformer_engine.jax.cpp_extensions.quantization import DBiasQuantizePrimitive, QuantizePrimitive
from transformer_engine.jax.quantize import (
    QuantizeLayout,
    ScaledTensor,
    ScaledTensor2x,
    ScalingMode,
    TensorUsage,
)

from jax_te.ops import xla
from jax_te.ops.pallas import BlockOperand
from jax_te.ops.te.capabilities import is_te_quantizer
from jax_te.ops.te.quantizer import inside_te, seen_amax, te_quantizer, two_sided, unmapped
from jax_te.quantize import Gemm, Quantization, QuantizedOperand, TensorQuantizer, amax, as_matrix
from jax_te.sharding import Dims, all_gather
from jax_te.typing import Array, DTypeLike

OURS = (QuantizedOperand, BlockOperand)
"""Operands that TE did not quantize."""


def quantize_operand(
    x: Array, how: Quantization, *, axis: int, x_amax: Array | None = None
) -> tuple[Any, Array | None]:
    """Return ``x`` as an operand, and its amax where the quantizer reports one.

    Args:
        x: the tensor.
        how: its quantization.
        axis: axis where its columns begin.
        x_amax: fp32 ``[1]``, amax of ``x``, for current scaling. None: not known yet.
    """
    quantizer, scale, _ = how = how if how.amax_axes is None else how.of_shard(x)
    if not is_te_quantizer(quantizer):
        return xla.quantize_operand(x, how, axis=axis)
    x = unmapped(x)
    axis = axis if axis < 0 else axis - x.ndim
    if isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "current":
        return _quantize_current(x, quantizer, axis, x_amax), None
    with inside_te():
        te_q = te_quantizer(quantizer, scale, as_matrix(x, axis))
        return tex.quantize(x, quantizer=te_q, flatten_axis=axis, amax_scope=AmaxScope.LOCAL), seen_amax(te_q)


def quantize_dbias(
    g: Array, how: Quantization, *, axis: int, bias_dtype: DTypeLike | None
) -> tuple[Any, Array | None, Array | None]:
    """Return the output's gradient as an operand, the bias gradient (None for ``bias_dtype`` None), the amax.

    With a quantizer and a bias, one TE kernel quantizes both ways and sums; te.jax takes three passes there.
    """
    quantizer, scale, _ = how = how if how.amax_axes is None else how.of_shard(g)
    if bias_dtype is None:
        operand, g_amax = quantize_operand(g, how, axis=axis)
        return operand, None, g_amax
    if isinstance(quantizer, TensorQuantizer) and is_te_quantizer(quantizer) and DBiasQuantizePrimitive.enabled():
        return _quantize_dbias_fused(unmapped(g), quantizer, scale, axis - g.ndim, bias_dtype)
    operand, g_amax = quantize_operand(g, how, axis=axis)
    return operand, xla.sum_rows(g, axis, bias_dtype), g_amax


def _quantize_current(x: Array, quantizer: TensorQuantizer, axis: int, x_amax: Array | None) -> Any:
    """Return ``x`` as an operand with a current scale, by TE's kernels, as ``tex.quantize`` does.

    The scale is ours: TE's is 1 where the amax is inf, with which its kernel makes inf finite.
    """
    with inside_te():
        te_q = te_quantizer(quantizer, None)
        if not QuantizePrimitive.enabled():  # then TE computes in plain JAX what our quantizer does
            form, _ = quantizer.quantize(x, None, axis=axis % x.ndim, columnwise=False)
            rows, scale_inv = form.data, form.scale_inv.reshape(1)
        else:
            x_amax = calculate_amax(x, AmaxScope.LOCAL, False) if x_amax is None else x_amax
            # As TE does, which writes rows alone and has XLA transpose them.
            rows, _, scale_inv, *_ = _cast(QuantizePrimitive, x, te_q, quantizer, (None, x_amax), axis)
        columns = jnp.transpose(rows, (*range(axis % x.ndim, x.ndim), *range(axis % x.ndim)))
        return two_sided(te_q, rows, columns, scale_inv, dtype=x.dtype, axis=axis)


def _cast(
    primitive: Any, x: Array, te_q: Any, quantizer: TensorQuantizer, known: tuple[Array | None, Array], axis: int
) -> Any:
    """Return the results of TE's kernel that quantizes under one scale.

    Args:
        primitive: ``QuantizePrimitive``, or ``DBiasQuantizePrimitive``, which also sums the bias gradient.
        x: the tensor.
        te_q: TE's quantizer.
        quantizer: ours.
        known: the scale, if it is given, and the amax.
        axis: axis where the columns begin, counted from the end.
    """
    scale, x_amax = known
    sums = primitive is DBiasQuantizePrimitive
    return primitive.outer_primitive.bind(
        x,
        quantizer.scale_for(x_amax.reshape(()), scale).reshape(1),
        x_amax.reshape(1),
        jnp.empty((0,), jnp.uint32),  # no stochastic rounding
        jnp.zeros((1,), jnp.float32),
        jnp.empty((1, 1), jnp.bfloat16),  # no Hadamard transform
        out_dtype=te_q.q_dtype,
        scaling_mode=te_q.scaling_mode.value,
        q_layout=te_q.q_layout if sums else QuantizeLayout.ROWWISE,
        flatten_axis=axis,
        scale_dtype=te_q.get_scale_dtype(),
        is_dbias=sums,
        is_outer=True,
        stochastic_rounding=False,
        use_rht=False,
    )


def _quantize_dbias_fused(
    g: Array, quantizer: TensorQuantizer, scale: Array | None, axis: int, bias_dtype: DTypeLike
) -> tuple[Any, Array, Array | None]:
    current = quantizer.scaling == "current"
    g_amax = amax(g) if current else jnp.zeros((), jnp.float32)
    with inside_te():
        te_q = te_quantizer(quantizer, scale)
        rows, columns, scale_inv, _, new_amax, dbias = _cast(
            DBiasQuantizePrimitive, g, te_q, quantizer, (scale, g_amax), axis
        )
        operand = two_sided(te_q, rows, columns, scale_inv, dtype=g.dtype, axis=axis)
    return operand, dbias.astype(bias_dtype), None if current else new_amax.reshape(())


def all_gather_operand(operand: Any, dims: Dims) -> Any:
    """Return an operand with one scale, all-gathered along mesh axes of each leading dimension.

    Rowwise and transposed values are both sent, in one byte each: together the bytes of one bf16 tensor, and the GEMMs
    need not wait for a transposition.
    """
    if isinstance(operand, OURS):
        return xla.all_gather_operand(operand, dims)
    if isinstance(operand, ScaledTensor2x):
        return ScaledTensor2x(_gathered(operand.rowwise_tensor, dims), _gathered(operand.colwise_tensor, dims))
    return _gathered(operand, dims)


def all_gather_kernel(kernel: Any, dims: Dims, gemm: Gemm) -> Any:
    """Return a kernel with one scale all-gathered, in the form that ``"fprop"`` or ``"dgrad"`` reads."""
    if isinstance(kernel, OURS):
        return xla.all_gather_kernel(kernel, dims, gemm)
    usage = TensorUsage.RHS if gemm == "fprop" else TensorUsage.RHS_TRANS
    return _gathered(kernel.get_tensor(usage=usage), dims)


def _gathered(form: Any, dims: Dims) -> Any:
    """Return one form of a tensor, all-gathered; a transposed form has the tensor's ``dims`` in another order."""
    if isinstance(form, ScaledTensor) and form.data_layout == "T":
        first = form.ndim - form.flatten_axis
        dims = dims + ((),) * (form.ndim - len(dims))
        dims = (*dims[first:], *dims[:first])
    return dataclasses.replace(form, data=all_gather(form.data, dims))


def residual_for_wgrad(x: Any) -> Any:
    """Return the copy of the input that the kernel gradient's GEMM reads."""
    return xla.residual_for_wgrad(x) if isinstance(x, OURS) else x.get_tensor(usage=TensorUsage.LHS_TRANS)


def residual_for_dgrad(kernel: Any) -> Any:
    """Return the copy of the kernel that the input gradient's GEMM reads."""
    if isinstance(kernel, OURS):
        return xla.residual_for_dgrad(kernel)
    return kernel.get_tensor(usage=TensorUsage.RHS_TRANS)


def gemm_fprop(x: Any, kernel: Any, bias: Array | None, split_accumulator: bool) -> Array:
    """Return ``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``; the bias is added by the GEMM."""
    if isinstance(x, OURS):
        return xla.gemm_fprop(x, kernel, bias, split_accumulator)
    lhs = x.get_tensor(usage=TensorUsage.LHS)
    if isinstance(kernel, QuantizedOperand):
        kernel = _adopted(kernel, lhs)
    rhs = kernel.get_tensor(usage=TensorUsage.RHS)
    dtype = lhs.dq_dtype if isinstance(lhs, ScaledTensor) else lhs.data.dtype
    if not isinstance(lhs, ScaledTensor):
        lhs, rhs = lhs.data, rhs.data.astype(dtype)
    bias = None if bias is None else bias.astype(dtype)
    # cuBLAS has no FP8 GEMM with fp32 output that also adds a bias, and XLA's of fp32 operands adds none.
    if bias is not None and dtype == jnp.float32:
        y = _gemm(lhs, rhs, ((x.ndim - 1,), (0,)), split_accumulator)
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
    return _gemm(lhs, rhs, ((x.ndim - 1,), (0,)), split_accumulator, bias=bias)


def gemm_dgrad(g: Any, kernel: Any, split_accumulator: bool) -> Array:
    """Return ``g [..., *n] @ kernel [k, *n]^T``, ``[..., k]`` in the dtype of ``g``."""
    if isinstance(g, OURS):
        return xla.gemm_dgrad(g, kernel, split_accumulator)
    lhs = g.get_tensor(usage=TensorUsage.LHS)
    if isinstance(kernel, QuantizedOperand):
        kernel = residual_for_dgrad(_adopted(kernel, lhs))
    rank = kernel.ndim
    if not isinstance(lhs, ScaledTensor):
        lhs, kernel = lhs.data, kernel.data.astype(lhs.data.dtype)
    contract = (tuple(range(lhs.ndim - rank + 1, lhs.ndim)), tuple(range(1, rank)))
    return _gemm(lhs, kernel, contract, split_accumulator)


def gemm_wgrad(x: Any, g: Any, dtype: DTypeLike, split_accumulator: bool) -> Array:
    """Return ``x [..., k]^T @ g [..., *n]``, ``[k, *n]``, accumulated in fp32 and returned in ``dtype``."""
    if isinstance(x, OURS):
        return xla.gemm_wgrad(x, g, dtype, split_accumulator)
    rows = tuple(range(x.ndim - 1))
    rhs = g.get_tensor(usage=TensorUsage.RHS)
    if isinstance(x, ScaledTensor):
        x = dataclasses.replace(x, dq_dtype=jnp.dtype(dtype))  # TE takes the output dtype from its left operand
        return _gemm(x, rhs, (rows, rows), split_accumulator)
    x, g, dtype = x.data, rhs.data, jnp.dtype(dtype)
    # TE's GEMM contracts at least one axis; of one token alone it would have none.
    if rows and x.dtype == dtype:
        return _gemm(x, g, (rows, rows), split_accumulator)
    if rows and dtype == jnp.float32 and x.dtype == g.dtype and x.dtype.itemsize == 2:
        return _gemm_to_fp32(x, g, (rows, rows))
    return jax.lax.dot_general(x, g, ((rows, rows), ((), ())), preferred_element_type=dtype)


def _gemm_to_fp32(lhs: Array, rhs: Array, contract: Any) -> Array:
    """Return the product of 16-bit operands in fp32, in which it is accumulated.

    ``tex.gemm`` gives the operands' dtype, so the primitive below it is called, which has cuBLAS write another one. XLA
    would measure many kernels for such a product when it compiles.
    """
    if not GemmPrimitive.enabled():  # then TE computes GEMMs in plain JAX, in the operands' dtype
        return jax.lax.dot_general(lhs, rhs, (contract, ((), ())), preferred_element_type=jnp.float32)
    none = jnp.empty(0, jnp.float32)
    with inside_te():
        (product,) = GemmPrimitive.outer_primitive.bind(
            lhs,
            none,  # no scale
            rhs,
            none,
            none,  # no bias
            jnp.ones((1,), jnp.float32),  # alpha, the factor of the product
            jnp.zeros((1,), jnp.float32),  # beta, the factor of what the result is added to
            out_dtype=jnp.dtype(jnp.float32),
            contracting_dims=contract,
            scaling_mode=ScalingMode.NO_SCALING,
            use_split_accumulator=False,  # of FP8 alone
            transpose_batch_sequence=False,
            sequence_dim=-1,
            is_outer=True,
            collective_op=CollectiveOp.NONE,
        )
    return product


def _gemm(lhs: Any, rhs: Any, contract: Any, split_accumulator: bool, bias: Array | None = None) -> Array:
    """TE's GEMM; ``tex.gemm`` reads the accumulation mode from the environment, so the function below it is called."""
    # TE has cuBLAS round fp32 operands to TF32, also under jax.default_matmul_precision("highest"), which XLA heeds.
    if not isinstance(lhs, ScaledTensor) and lhs.dtype == jnp.float32:
        return jax.lax.dot_general(lhs, rhs, (contract, ((), ())))
    with inside_te():
        if not (split_accumulator and isinstance(lhs, ScaledTensor) and GemmPrimitive.enabled()):
            return tex.gemm(lhs, rhs, bias=bias, contracting_dims=contract)
        return _te_gemm(lhs, rhs, bias, contracting_dims=contract, use_split_accumulator=True)


def _adopted(kernel: QuantizedOperand, other: Any) -> Any:
    """TE's tensor object of a kernel that is stored quantized with one scale.

    ``other`` is its other operand: TE requires both to have the same scaling mode.
    """
    form = kernel.rowwise
    assert form.block is None  # `jax_te.ops.te.supports` refuses kernels stored in blocks
    given = other.scaling_mode == ScalingMode.DELAYED_TENSOR_SCALING
    quantizer = TensorQuantizer(dtype=form.data.dtype, scaling="given" if given else "current")
    te_q = te_quantizer(quantizer, jnp.ones((), jnp.float32))
    columns = jnp.transpose(form.data, (*range(1, form.ndim), 0))
    return two_sided(te_q, form.data, columns, form.scale_inv.reshape(1), dtype=form.dtype, axis=1 - form.ndim)
