"""Layer and RMS normalization by Transformer Engine."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.jax.cpp_extensions.amax import AmaxScope

from jax_te.ops import xla
from jax_te.ops.linear.norm_and_activation import NormSpec
from jax_te.ops.te.capabilities import is_te_quantizer
from jax_te.ops.te.gemm import quantize_operand
from jax_te.ops.te.quantizer import inside_te, seen_amax, te_quantizer, unmapped
from jax_te.quantize import Quantization, TensorQuantizer
from jax_te.typing import Array


def _gamma(scale: Array, x: Array, spec: NormSpec) -> tuple[Array, bool]:
    """Return the scale in the dtype of ``x``, and whether TE is to add 1 to it: it does not support that for RMS
    norm."""
    if spec.kind == "rmsnorm" and spec.zero_centered_gamma:
        return (scale.astype(jnp.float32) + 1.0).astype(x.dtype), False
    return scale.astype(x.dtype), spec.zero_centered_gamma


def _beta(bias: Array | None, gamma: Array, spec: NormSpec) -> Array | None:
    """Return the bias in the dtype of the scale; zeros for a layer norm without bias, which TE does not support."""
    if bias is None:
        return jnp.zeros_like(gamma) if spec.kind == "layernorm" else None
    return bias.astype(gamma.dtype)


def norm_quantize(
    x: Array, scale: Array, bias: Array | None, spec: NormSpec, how: Quantization
) -> tuple[Any, Any, Array | None]:
    """Return the norm's output as an operand, the statistics for backward, the output's amax where reported.

    ``x`` has rows, see `norm`: calls with a quantizer are padded to at least one block before.
    """
    x = x if how.quantizer is None else unmapped(x)
    if not is_te_quantizer(how.quantizer) or how.needs_amax:
        y, stats = norm(x, scale, bias, spec)
        operand, y_amax = quantize_operand(y, how, axis=-1)
        return operand, stats, y_amax
    gamma, zero_centered = _gamma(scale, x, spec)
    if isinstance(how.quantizer, TensorQuantizer) and how.quantizer.scaling == "current":
        y, stats = _norm_with_amax(x, gamma, _beta(bias, gamma, spec), zero_centered, spec)
        operand, _ = quantize_operand(y.data, how, axis=-1, x_amax=y.amax)
        return operand, stats, None
    with inside_te():
        te_q = te_quantizer(how.quantizer, how.scale)
        operand, mean, rstd = tex.normalization_fwd(
            x,
            gamma,
            _beta(bias, gamma, spec),
            zero_centered,
            spec.epsilon,
            spec.kind,
            quantizer=te_q,
            amax_scope=AmaxScope.LOCAL,
        )
    return operand, (mean, rstd), seen_amax(te_q)


def _norm_with_amax(x: Array, gamma: Array, beta: Array | None, zero_centered: bool, spec: NormSpec) -> tuple[Any, Any]:
    """Return the norm's output with its amax, which TE's kernel finds, as its tensor object; and the statistics."""
    options: dict[str, Any] = {"amax_scope": AmaxScope.LOCAL, "output_amax_when_no_scaling": True}
    with inside_te():
        if spec.kind == "layernorm":
            y, mean, rstd = tex.layernorm_fwd(x, gamma, beta, zero_centered, spec.epsilon, None, **options)
            return y, (mean, rstd)
        y, rstd = tex.rmsnorm_fwd(x, gamma, zero_centered, spec.epsilon, None, **options)
        return y, (None, rstd)


def norm(x: Array, scale: Array, bias: Array | None, spec: NormSpec) -> tuple[Array, Any]:
    """Return ``x [..., h]`` normalized over its last axis, in its dtype, and the statistics for backward."""
    # CUDA refuses to launch TE's kernels on zero rows, and that error destroys the process's context.
    if x.size == 0:
        return xla.norm(x, scale, bias, spec)
    operand, stats, _ = norm_quantize(x, scale, bias, spec, Quantization())
    return operand.data, stats


def norm_backward(
    dy: Array, x: Array, stats: Any, scale: Array, bias: Array | None, spec: NormSpec
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of input, scale and bias, each in the dtype of what it belongs to."""
    if x.size == 0:
        return xla.norm_backward(dy, x, stats, scale, bias, spec)
    mean, rstd = stats
    gamma, zero_centered = _gamma(scale, x, spec)
    with inside_te():
        dx, dscale, dbias = tex.normalization_bwd(
            dy,
            x,
            mean,
            rstd,
            gamma,
            _beta(bias, gamma, spec),
            zero_centered_gamma=zero_centered,
            epsilon=spec.epsilon,
            norm_type=spec.kind,
        )
    return dx, dscale.astype(scale.dtype), None if bias is None else dbias.astype(bias.dtype)
