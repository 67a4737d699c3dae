"""Layer and RMS normalization in plain JAX: fp32 (of fp64: fp64) inside, the input's dtype outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.linear.norm_and_activation import NormSpec
from jax_te.ops.wide import wide_dtype
from jax_te.ops.xla.gemm import quantize_operand
from jax_te.quantize import Operand, Quantization
from jax_te.typing import Array, DTypeLike

Stats = tuple[Array, Array]
"""Wide mean and reciprocal standard deviation (RMS norm: zero and reciprocal root mean square), both ``[..., 1]``."""


def _gamma(scale: Array, spec: NormSpec, dtype: DTypeLike) -> Array:
    # In a wide dtype: in bf16 an offset below 2^-9 would be lost beside the 1.
    gamma = scale.astype(dtype)
    return gamma + 1.0 if spec.zero_centered_gamma else gamma


def _rows(vector: Array, like: Array) -> Array:
    return jnp.expand_dims(vector, tuple(range(like.ndim - 1)))


def norm(x: Array, scale: Array, bias: Array | None, spec: NormSpec) -> tuple[Array, Stats]:
    """Return ``x [..., h]`` normalized over its last axis, in its dtype, and the statistics for backward."""
    dtype = wide_dtype(x.dtype)
    wide = x.astype(dtype)
    if spec.kind == "layernorm":
        mean = jnp.mean(wide, axis=-1, keepdims=True)
    else:
        # Centered at zero instead of the mean, which turns the lines below into RMS norm.
        mean = jnp.zeros((*x.shape[:-1], 1), dtype)
    centred = wide - mean
    # Of the centred values: mean(x²) - mean(x)² cancels where the mean is large.
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + spec.epsilon)
    y = centred * rstd * _rows(_gamma(scale, spec, dtype), x)
    if bias is not None:
        y = y + _rows(bias.astype(dtype), x)
    return y.astype(x.dtype), (mean, rstd)


def norm_quantize(
    x: Array, scale: Array, bias: Array | None, spec: NormSpec, how: Quantization
) -> tuple[Operand, Stats, Array | None]:
    """Return `norm`'s output as an operand, the statistics, the output's amax."""
    y, stats = norm(x, scale, bias, spec)
    operand, y_amax = quantize_operand(y, how, axis=-1)
    return operand, stats, y_amax


def norm_backward(
    dy: Array, x: Array, stats: Stats, scale: Array, bias: Array | None, spec: NormSpec
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of input, scale and bias, each in the dtype of what it belongs to."""
    mean, rstd = stats
    dtype = wide_dtype(x.dtype)
    normed = (x.astype(dtype) - mean) * rstd
    dy = dy.astype(dtype)
    rows = tuple(range(x.ndim - 1))
    # Summed over all rows in the wide dtype, and rounded once.
    dscale = jnp.sum(dy * normed, axis=rows).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=rows).astype(bias.dtype)
    dnormed = dy * _rows(_gamma(scale, spec, dtype), x)
    dx = dnormed - normed * jnp.mean(dnormed * normed, axis=-1, keepdims=True)
    if spec.kind == "layernorm":
        dx = dx - jnp.mean(dnormed, axis=-1, keepdims=True)
    return (dx * rstd).astype(x.dtype), dscale, dbias
