"""Normalization followed by a linear transformation, with the normalized input quantized as it is produced."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_te.ops.backend import BackendName, select
from jax_te.ops.gemm import Forms, GemmSpec, LinearGemms, gemm_spec
from jax_te.ops.layernorm import check_norm
from jax_te.ops.quantize_kernel import ready_kernel
from jax_te.ops.spec import NormSpec
from jax_te.parallel import auto_region
from jax_te.quantize import GemmState, QuantizedKernel
from jax_te.recipe import Recipe
from jax_te.typing import Array, LogicalAxes


def layernorm_dense(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None = None,
    *,
    norm: NormSpec = NormSpec(),
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    out_axes: LogicalAxes | None = None,
    kernel_axes: LogicalAxes | None = None,
    gradient: Array | None = None,
    name: str | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``norm(x) @ kernel + bias``, see `layernorm` and `dense`.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        kernel, bias: ``[h, *n]`` (or quantized beforehand) and ``[*n]`` or None.
        norm, recipe, state, out_axes, kernel_axes, gradient, name, backend: as in `layernorm` and `dense`; the
            quantized input is the norm's output.

    Returns:
        ``[..., *n]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, BackendUnavailableError: as `dense`.

    Source: ``transformer_engine.jax.layernorm_dense.layernorm_dense``.

    >>> import jax.numpy as jnp
    >>> layernorm_dense(jnp.ones((4, 16)), jnp.ones(16), jnp.zeros(16), jnp.ones((16, 8))).shape
    (4, 8)
    """
    check_norm("layernorm_dense", x.shape[-1], scale, ln_bias, norm)
    kernel = ready_kernel(kernel, gradient, recipe)
    chosen = select("layernorm_dense", recipe=recipe, backend=backend)
    spec = gemm_spec(
        "layernorm_dense",
        x.shape,
        kernel,
        bias,
        recipe=recipe,
        backend=chosen,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
        gradient=gradient,
        name=name,
    )
    LinearGemms(spec, state)  # raises for a missing state
    fn = functools.partial(_layernorm_dense, spec, norm)
    return auto_region(fn, out_axes)(x, scale, ln_bias, kernel, bias, state, gradient)


def normed_operand(
    gemms: LinearGemms, x: Array, scale: Array, ln_bias: Array | None, norm: NormSpec
) -> tuple[Forms, Any, Array | None]:
    """The norm's output as the GEMMs want it, the statistics that backward needs, the amax."""
    if gemms.fuses("x"):
        operand, stats, y_amax = gemms.run.norm_quantize(x, scale, ln_bias, norm, *gemms.quantizers["x"])
        return gemms.adopt(operand, "x"), stats, y_amax
    y, stats = gemms.run.norm(x, scale, ln_bias, norm)
    forms, y_amax = gemms.operand(y, "x", axis=-1)
    return forms, stats, y_amax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layernorm_dense(
    spec: GemmSpec,
    norm: NormSpec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> Array:
    return _forward(spec, norm, x, scale, ln_bias, kernel, bias, state, gradient)[0]


def _forward(
    spec: GemmSpec,
    norm: NormSpec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    gemms = LinearGemms(spec, state)
    y_forms, stats, y_amax = normed_operand(gemms, x, scale, ln_bias, norm)
    kernel_forms, kernel_amax = gemms.kernel(kernel)
    out = gemms.fprop(y_forms, kernel_forms, bias)
    kept = gemms.keep(y_forms, kernel_forms)
    return out, (x, stats, scale, ln_bias, kept, y_amax, kernel_amax, state, gradient)


def _backward(spec: GemmSpec, norm: NormSpec, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, stats, scale, ln_bias, kept, y_amax, kernel_amax, state, gradient = saved
    gemms = LinearGemms(spec, state)
    g_forms, dbias, g_amax = gemms.gradient(g)
    dy, dkernel = gemms.backward(kept, g_forms)
    dx, dscale, dln_bias = gemms.run.norm_backward(dy, x, stats, scale, ln_bias, norm)
    next_state = gemms.quantizers.next_state({"x": y_amax, "kernel": kernel_amax, "grad": g_amax})
    dkernel, dgradient = gemms.cotangents(dkernel, gradient)
    return dx, dscale, dln_bias, dkernel, dbias, next_state, dgradient


_layernorm_dense.defvjp(_forward, _backward)
