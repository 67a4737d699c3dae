"""Normalization followed by a linear transformation, with the normalized input quantized as it is produced."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.gemm import GemmSpec, dgrad_wgrad, fprop, gemm_spec, quantize_gradient
from jax_te.ops.layernorm import check_norm
from jax_te.ops.spec import NormSpec
from jax_te.parallel import auto_region
from jax_te.quantize import GemmQuantizers, GemmState
from jax_te.recipe import Recipe
from jax_te.typing import Array, LogicalAxes


def layernorm_dense(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array,
    bias: Array | None = None,
    *,
    norm: NormSpec = NormSpec(),
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    out_axes: LogicalAxes | None = None,
    kernel_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``norm(x) @ kernel + bias``, see `layernorm` and `dense`.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        kernel, bias: ``[h, *n]`` and ``[*n]`` or None.
        norm, recipe, state, out_axes, kernel_axes, backend: as in `layernorm` and `dense`; the quantized input is
            the norm's output.

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
    name = select("layernorm_dense", recipe=recipe, backend=backend)
    spec = gemm_spec(
        "layernorm_dense",
        x.shape,
        kernel,
        bias,
        recipe=recipe,
        backend=name,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
    )
    GemmQuantizers(recipe, state)  # raises for a missing state
    fn = functools.partial(_layernorm_dense, spec, norm)
    return auto_region(fn, out_axes)(x, scale, ln_bias, kernel, bias, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layernorm_dense(
    spec: GemmSpec,
    norm: NormSpec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array,
    bias: Array | None,
    state: GemmState | None,
) -> Array:
    return _forward(spec, norm, x, scale, ln_bias, kernel, bias, state)[0]


def _forward(
    spec: GemmSpec,
    norm: NormSpec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array,
    bias: Array | None,
    state: GemmState | None,
) -> tuple[Array, tuple[Any, ...]]:
    run, quantizers = primitives(spec.backend), GemmQuantizers(spec.recipe, state)
    y_q, stats, y_amax = run.norm_quantize(x, scale, ln_bias, norm, *quantizers["x"])
    out, kernel_q, kernel_amax = fprop(run, spec, quantizers, y_q, kernel, bias)
    saved = (x, stats, scale, ln_bias, run.keep_x(y_q), run.keep_kernel(kernel_q), y_amax, kernel_amax, state)
    return out, saved


def _backward(spec: GemmSpec, norm: NormSpec, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, stats, scale, ln_bias, y_q, kernel_q, y_amax, kernel_amax, state = saved
    run, quantizers = primitives(spec.backend), GemmQuantizers(spec.recipe, state)
    g_q, dbias, g_amax = quantize_gradient(run, spec, quantizers, g)
    dy, dkernel = dgrad_wgrad(run, spec, y_q, kernel_q, g_q)
    dx, dscale, dln_bias = run.norm_backward(dy, x, stats, scale, ln_bias, norm)
    next_state = quantizers.next_state({"x": y_amax, "kernel": kernel_amax, "grad": g_amax})
    return dx, dscale, dln_bias, dkernel, dbias, next_state


_layernorm_dense.defvjp(_forward, _backward)
