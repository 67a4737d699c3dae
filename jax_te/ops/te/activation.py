"""Activations by Transformer Engine."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.jax.cpp_extensions.activation import (
    ActivationEnum,
    ClampedSwigluParams,
    DActLuDBiasQuantizePrimitive,
)
from transformer_engine.jax.cpp_extensions.activation import ActivationParams as TEActivationParams
from transformer_engine.jax.cpp_extensions.amax import AmaxScope

from jax_te.config import ActivationParams
from jax_te.ops import xla
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.te.capabilities import is_te_quantizer
from jax_te.ops.te.gemm import quantize_dbias, quantize_operand
from jax_te.ops.te.quantizer import inside_te, seen_amax, te_quantizer, two_sided, unmapped
from jax_te.quantize import Quantization, TensorQuantizer
from jax_te.typing import Array, DTypeLike


def has_kernel(activation: Activation) -> bool:
    """Return whether TE has a kernel: not for the exact GELU, nor for a user's function."""
    return activation.parts() in ActivationEnum


def act_quantize(x: Array, activation: Activation, how: Quantization) -> tuple[Any, Array | None]:
    """Return ``x [..., n_act, f]`` activated, ``[..., f]``, as an operand, and its amax where reported."""
    x = x if how.quantizer is None else unmapped(x)
    if not is_te_quantizer(how.quantizer) or how.needs_amax or not has_kernel(activation):
        return quantize_operand(act(x, activation), how, axis=-1)
    is_current = isinstance(how.quantizer, TensorQuantizer) and how.quantizer.scaling == "current"
    with inside_te():
        if is_current:  # with its amax, which TE's kernel finds
            z = tex.act_lu(
                x,
                activation.parts(),
                act_params=_te_params(activation.params),
                amax_scope=AmaxScope.LOCAL,
                output_amax_when_no_scaling=True,
            )
            return quantize_operand(z.data, how, axis=-1, x_amax=z.amax)
        te_q = te_quantizer(how.quantizer, how.scale)
        operand = tex.act_lu(
            x, activation.parts(), quantizer=te_q, act_params=_te_params(activation.params), amax_scope=AmaxScope.LOCAL
        )
    return operand, seen_amax(te_q)


def _te_params(params: ActivationParams | None) -> TEActivationParams:
    params = params or ActivationParams()
    return TEActivationParams(
        ClampedSwigluParams(limit=params.limit, alpha=params.alpha, glu_linear_offset=params.linear_offset)
    )


def act(x: Array, activation: Activation) -> Array:
    """Return `act_quantize`'s result without quantization: an array in the dtype of ``x``."""
    # Without rows no kernel, see `jax_te.ops.te.norm.norm`.
    if not has_kernel(activation) or x.size == 0:
        return xla.act(x, activation)
    return act_quantize(x, activation, Quantization())[0].data


def act_backward_quantize(
    dz: Array, x: Array, activation: Activation, how: Quantization, *, bias_dtype: DTypeLike | None
) -> tuple[Any, Array | None, Array | None]:
    """Return the gradient of ``x`` from ``dz [..., f]`` as an operand, its bias gradient, its amax.

    Where the scale is known beforehand, one TE kernel differentiates, quantizes both ways, finds the amax and, of an
    activation with one component, sums the bias gradient. Otherwise a TE kernel quantizes `act_backward`'s result and
    sums it: te.jax's own way there writes an fp32 tensor of the same shape first (measured in docs/performance.md).
    """
    quantizer, parts = how.quantizer, activation.parts()
    dz = dz if quantizer is None else unmapped(dz)
    if isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "given" and has_kernel(activation):
        # Without rows no kernel, see `jax_te.ops.te.norm.norm`.
        if bias_dtype is None and x.size:
            return _differentiated(dz, x, activation, quantizer, how.scale)
        if bias_dtype is not None and len(parts) == 1 and DActLuDBiasQuantizePrimitive.enabled():
            return _differentiated_with_bias(dz, x, parts, quantizer, how.scale, bias_dtype)
    return quantize_dbias(act_backward(dz, x, activation), how, axis=x.ndim - 2, bias_dtype=bias_dtype)


def _differentiated(
    dz: Array, x: Array, activation: Activation, quantizer: TensorQuantizer, scale: Array | None
) -> tuple[Any, None, Array | None]:
    with inside_te():
        te_q = te_quantizer(quantizer, scale)
        operand = tex.dact_lu(
            dz,
            x,
            activation.parts(),
            quantizer=te_q,
            act_params=_te_params(activation.params),
            amax_scope=AmaxScope.LOCAL,
        )
    return operand, None, seen_amax(te_q)


def _differentiated_with_bias(
    dz: Array, x: Array, parts: tuple[str, ...], quantizer: TensorQuantizer, scale: Array | None, bias_dtype: DTypeLike
) -> tuple[Any, Array, Array]:
    with inside_te():
        te_q = te_quantizer(quantizer, scale)
        rows, columns, scale_inv, _, new_amax, dbias = DActLuDBiasQuantizePrimitive.outer_primitive.bind(
            dz,
            x,
            te_q.scale,
            jnp.zeros((1,), jnp.float32),
            out_dtype=te_q.q_dtype,
            scaling_mode=te_q.scaling_mode.value,
            quantize_layout=te_q.q_layout,
            scale_dtype=te_q.get_scale_dtype(),
            is_dbias=True,
            act_enum=ActivationEnum[parts],
            act_len=len(parts),
            act_params=TEActivationParams(),  # an activation with one component has none
            amax_scope=AmaxScope.LOCAL,
            transpose_batch_sequence=False,
            output_amax_when_no_scaling=False,
            is_outer=True,
        )
        operand = two_sided(te_q, rows, columns, scale_inv, dtype=x.dtype, axis=-2)
    return operand, dbias.astype(bias_dtype), new_amax.reshape(())


def act_backward(dz: Array, x: Array, activation: Activation) -> Array:
    """Return the input gradient ``[..., n_act, f]`` in the dtype of ``x``.

    XLA's kernel also computes the bias gradient or the amax, TE's does not; but XLA's takes 1.4 to 1.6 times as long
    for a gated activation (measured in docs/performance.md).
    """
    if len(activation.parts()) == 1 or not has_kernel(activation) or x.size == 0:
        return xla.act_backward(dz, x, activation)
    with inside_te():
        gradient = tex.dact_lu(
            dz, x, activation.parts(), act_params=_te_params(activation.params), amax_scope=AmaxScope.LOCAL
        )
    return gradient.data
