"""Normalization followed by a linear transformation, with the normalized input quantized as it is produced."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.ops.backend import BackendName, select
from jax_te.ops.linear.gemm import Forms, GemmSpec, LinearGemms, cotangents, gemm_spec
from jax_te.ops.linear.layernorm import check_norm
from jax_te.ops.linear.plan import gemm_ranks, kernel_layout, norm_ranks, place_linear
from jax_te.ops.linear.quantize_kernel import ready_kernel
from jax_te.ops.linear.spec import NormSpec
from jax_te.ops.linear.split_gemms import linear_gemms
from jax_te.quantize import GemmState, QuantizedKernel
from jax_te.recipe import Recipe
from jax_te.sharding import auto_region
from jax_te.sharding.internal import PER_RANK, WHOLE, on_ranks, place
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
    x_axes: LogicalAxes | None = None,
    gradient: Array | None = None,
    name: str | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``norm(x) @ kernel + bias``, see `layernorm` and `dense`.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        kernel, bias: ``[h, *n]`` (or quantized beforehand) and ``[*n]`` or None.
        norm, recipe, state, out_axes, kernel_axes, x_axes, gradient, name, backend: as in `layernorm` and `dense`; the
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
    ranks = norm_ranks(
        gemm_ranks(
            x.shape, kernel, x_axes=x_axes, kernel_axes=kernel_axes, out_axes=out_axes, recipe=recipe, state=state
        )
    )
    chosen = select("layernorm_dense", recipe=recipe, backend=backend, ranks=ranks)
    spec = gemm_spec(
        "layernorm_dense",
        x.shape,
        kernel,
        bias,
        recipe=recipe,
        backend=chosen,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
        x_dtype=x.dtype,
        gradient=gradient,
        name=name,
        ranks=ranks,
    )
    LinearGemms(spec, state)  # raises for a missing state
    static = _Spec(norm=norm, gemm=spec)
    if spec.ranks is None:
        fn = functools.partial(_layernorm_dense, static)
        return auto_region(fn, out_axes)(x, scale, ln_bias, kernel, bias, state, gradient)
    scale, ln_bias = place((scale, ln_bias), WHOLE, spec.ranks.mesh)
    x = place(x, spec.ranks.x, spec.ranks.mesh)
    kernel, bias, state = place_linear(spec.ranks, kernel, bias, state)
    return _layernorm_dense(static, x, scale, ln_bias, kernel, bias, state, gradient)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    norm: NormSpec
    gemm: GemmSpec


def normed_operand(
    gemms: LinearGemms, x: Array, scale: Array, ln_bias: Array | None, norm: NormSpec
) -> tuple[Forms, Any, Array | None]:
    """The norm's output as the GEMMs want it, the statistics that backward needs, the amax."""
    if gemms.fuses("x"):
        operand, stats, y_amax = gemms.run.norm_quantize(
            x, scale, ln_bias, norm, *gemms.quantizers["x"], reduce=gemms.reduce
        )
        return gemms.adopt(operand, "x"), stats, y_amax
    y, stats = gemms.run.norm(x, scale, ln_bias, norm)
    forms, y_amax = gemms.operand(y, "x", axis=-1)
    return forms, stats, y_amax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_dense(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> Array:
    return _forward(spec, x, scale, ln_bias, kernel, bias, state, gradient)[0]


def _forward(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    arrays, ranks = (x, scale, ln_bias, kernel, bias, state), spec.gemm.ranks
    if ranks is None:
        out, saved = _run(spec, *arrays)
    else:
        layouts = (ranks.x, WHOLE, WHOLE, kernel_layout(kernel, ranks.kernel), ranks.bias, WHOLE)
        out, saved = on_ranks(_run, spec, ranks.mesh, layouts, (ranks.out, (PER_RANK, PER_RANK)), arrays)
    return checkpoint_name(out, "gemm"), (*saved, scale, ln_bias, state, gradient)


def _run(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
) -> tuple[Array, Any]:
    gemms = linear_gemms(spec.gemm, state)
    y_forms, stats, y_amax = normed_operand(gemms, x, scale, ln_bias, spec.norm)
    kernel_forms, kernel_amax = gemms.kernel(kernel)
    out = gemms.fprop(y_forms, kernel_forms, bias)
    # The kernel that quantizes writes the statistics, too: without the name it would run again for them.
    stats, operands = checkpoint_name((stats, (gemms.keep(y_forms, kernel_forms), y_amax, kernel_amax)), "quantized")
    return out, ((x, stats), operands)


def _backward(spec: _Spec, kept: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    normed, operands, scale, ln_bias, state, gradient = kept
    arrays = (normed, operands, scale, ln_bias, state, g)
    ranks = spec.gemm.ranks
    if ranks is None:
        gradients = _run_backward(spec, *arrays)
    else:
        gradients = on_ranks(
            _run_backward,
            spec,
            ranks.mesh,
            (PER_RANK, PER_RANK, WHOLE, WHOLE, WHOLE, ranks.out),
            (ranks.x, WHOLE, WHOLE, ranks.kernel, ranks.bias, WHOLE),
            arrays,
        )
    dx, dscale, dln_bias, dkernel, dbias, next_state = gradients
    dkernel, dgradient = cotangents(spec.gemm, dkernel, gradient)
    return dx, dscale, dln_bias, dkernel, dbias, next_state, dgradient


def _run_backward(
    spec: _Spec, normed: Any, operands: Any, scale: Array, ln_bias: Array | None, state: GemmState | None, g: Array
) -> tuple[Any, ...]:
    (x, stats), (kept, y_amax, kernel_amax) = normed, operands
    gemms = linear_gemms(spec.gemm, state)
    gemms.begin_backward(g)
    g_forms, dbias, g_amax = gemms.gradient(g)
    dy, dkernel = gemms.backward(kept, g_forms)
    dx, *dnorm = gemms.run.norm_backward(dy, x, stats, scale, ln_bias, spec.norm)
    next_state = gemms.next_state({"x": y_amax, "kernel": kernel_amax, "grad": g_amax})
    return dx, *gemms.norm_gradients(*dnorm), dkernel, dbias, next_state


_layernorm_dense.defvjp(_forward, _backward)
