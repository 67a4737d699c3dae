"""GEMMs of a linear layer and the quantization of their operands, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.quantize import Operand, QuantizedTensor, Quantizer, quantize
from jax_te.typing import Array, DTypeLike


def quantize_operand(
    x: Array, quantizer: Quantizer | None, scale: Array | None, *, axis: int
) -> tuple[Operand, Array | None]:
    """``x`` quantized, and its amax; without a quantizer ``x`` and None. ``axis`` is for layouts this backend has no
    use for.
    """
    del axis
    return (x, None) if quantizer is None else quantize(x, quantizer, scale)


def sum_rows(g: Array, axis: int, dtype: DTypeLike) -> Array:
    """Sum in fp32 over the axes before ``axis``: a bias gradient."""
    return jnp.sum(g, axis=tuple(range(axis)), dtype=jnp.float32).astype(dtype)


def quantize_dbias(
    g: Array, quantizer: Quantizer | None, scale: Array | None, *, axis: int, bias_dtype: DTypeLike | None
) -> tuple[Operand, Array | None, Array | None]:
    """The output gradient as an operand, the bias gradient (None for ``bias_dtype`` None), the amax."""
    dbias = None if bias_dtype is None else sum_rows(g, axis, bias_dtype)
    operand, g_amax = quantize_operand(g, quantizer, scale, axis=axis)
    return operand, dbias, g_amax


def keep_x(x: Operand) -> Operand:
    """What backward needs of the input."""
    return x


def keep_kernel(kernel: Operand) -> Operand:
    """What backward needs of the kernel."""
    return kernel


def _dot(lhs: Operand, rhs: Operand, contract: tuple[tuple[int, ...], tuple[int, ...]], dtype: DTypeLike) -> Array:
    if isinstance(lhs, QuantizedTensor):
        assert isinstance(rhs, QuantizedTensor)
        # The FP8 product is accumulated and scaled in fp32 and rounded once, as FP8 GEMM units do.
        product = jax.lax.dot_general(lhs.data, rhs.data, (contract, ((), ())), preferred_element_type=jnp.float32)
        return (product * (lhs.scale_inv * rhs.scale_inv)).astype(dtype)
    assert not isinstance(rhs, QuantizedTensor)
    return jax.lax.dot_general(lhs, rhs, (contract, ((), ())), preferred_element_type=jnp.dtype(dtype))


def gemm_fprop(x: Operand, kernel: Operand, bias: Array | None) -> Array:
    """``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
    if not isinstance(kernel, QuantizedTensor):
        kernel = kernel.astype(x.dtype)
    y = _dot(x, kernel, ((x.ndim - 1,), (0,)), x.dtype)
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))


def gemm_dgrad(g: Operand, kernel: Operand) -> Array:
    """``g [..., *n] @ kernel [k, *n]^T`` -> ``[..., k]`` in the dtype of ``g``."""
    if not isinstance(kernel, QuantizedTensor):
        kernel = kernel.astype(g.dtype)
    out_axes = kernel.ndim - 1
    contract = (tuple(range(g.ndim - out_axes, g.ndim)), tuple(range(1, kernel.ndim)))
    return _dot(g, kernel, contract, g.dtype)


def gemm_wgrad(x: Operand, g: Operand, dtype: DTypeLike) -> Array:
    """``x [..., k]^T @ g [..., *n]`` -> ``[k, *n]``, accumulated in fp32 and given in ``dtype``."""
    rows = tuple(range(x.ndim - 1))
    return _dot(x, g, (rows, rows), dtype)
