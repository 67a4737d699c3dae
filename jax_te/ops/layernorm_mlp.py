"""Normalization, first projection, activation, second projection: the feed-forward block as one op."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.gemm import GemmSpec, dgrad_wgrad, fprop, gemm_spec, quantize_gradient
from jax_te.ops.layernorm import check_norm
from jax_te.ops.spec import NormSpec, activation_parts
from jax_te.parallel import auto_region, constrain
from jax_te.quantize import GemmQuantizers, GemmState
from jax_te.recipe import Recipe
from jax_te.typing import Array, LogicalAxes

States = tuple[GemmState, GemmState] | tuple[None, None]


def layernorm_mlp(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Array,
    wi_bias: Array | None,
    wo_kernel: Array,
    wo_bias: Array | None,
    *,
    norm: NormSpec = NormSpec(),
    activation: str = "gelu",
    recipe: Recipe | None = None,
    states: States | None = None,
    ffn_axes: LogicalAxes | None = None,
    out_axes: LogicalAxes | None = None,
    wi_axes: LogicalAxes | None = None,
    wo_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``act(norm(x) @ wi + wi_bias) @ wo + wo_bias``; every GEMM operand is quantized where it is produced.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        wi_kernel, wi_bias: ``[h, n_act, f]`` and ``[n_act, f]`` or None; ``n_act`` is the activation's number of
            components.
        wo_kernel, wo_bias: ``[f, h]`` and ``[h]`` or None.
        activation: a key of `jax_te.config.ACTIVATIONS`.
        states: the recipe's states of the two linear layers, if it has any; their gradients are their next values.
        ffn_axes: logical axes of the activated tensor ``[..., f]``.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        wi_axes, wo_axes: logical axes of the kernels, which their gradients are constrained to.
        norm, recipe, backend: as in `layernorm_dense`.

    Returns:
        ``[..., h]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, BackendUnavailableError: as `dense`.

    Source: ``transformer_engine.jax.layernorm_mlp.layernorm_mlp``. There FFN2's output gradient uses FFN1's
        quantizer and the
    other way round; here each state belongs to its own layer.

    >>> import jax.numpy as jnp
    >>> wi, wo = jnp.ones((16, 2, 32)), jnp.ones((32, 16))
    >>> layernorm_mlp(jnp.ones((4, 16)), jnp.ones(16), None, wi, None, wo, None, activation="swiglu").shape
    (4, 16)
    """
    check_norm("layernorm_mlp", x.shape[-1], scale, ln_bias, norm)
    parts = len(activation_parts(activation))
    if wi_kernel.ndim != 3 or wi_kernel.shape[1] != parts:
        raise ValueError(f"layernorm_mlp: wi_kernel must be [h, {parts}, f] for {activation!r}, got {wi_kernel.shape}")
    states = (None, None) if states is None else states
    name = select("layernorm_mlp", recipe=recipe, backend=backend)
    wide_axes = None if ffn_axes is None else (*ffn_axes[:-1], "joined", ffn_axes[-1])
    spec = _Spec(
        norm=norm,
        activation=activation,
        ffn_axes=ffn_axes,
        wi=gemm_spec(
            "layernorm_mlp (wi)", x.shape, wi_kernel, wi_bias,
            recipe=recipe, backend=name, out_axes=wide_axes, kernel_axes=wi_axes,
        ),
        wo=gemm_spec(
            "layernorm_mlp (wo)", (*x.shape[:-1], wi_kernel.shape[2]), wo_kernel, wo_bias,
            recipe=recipe, backend=name, out_axes=out_axes, kernel_axes=wo_axes,
        ),
    )  # fmt: skip
    for state in states:
        GemmQuantizers(recipe, state)  # raises for a missing state
    fn = functools.partial(_layernorm_mlp, spec)
    return auto_region(fn, out_axes)(x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    norm: NormSpec
    activation: str
    ffn_axes: LogicalAxes | None
    wi: GemmSpec
    wo: GemmSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_mlp(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Array,
    wi_bias: Array | None,
    wo_kernel: Array,
    wo_bias: Array | None,
    states: States,
) -> Array:
    return _forward(spec, x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states)[0]


def _forward(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Array,
    wi_bias: Array | None,
    wo_kernel: Array,
    wo_bias: Array | None,
    states: States,
) -> tuple[Array, tuple[Any, ...]]:
    run = primitives(spec.wi.backend)
    wi_quantizers = GemmQuantizers(spec.wi.recipe, states[0])
    wo_quantizers = GemmQuantizers(spec.wo.recipe, states[1])

    y_q, stats, y_amax = run.norm_quantize(x, scale, ln_bias, spec.norm, *wi_quantizers["x"])
    pre, wi_q, wi_amax = fprop(run, spec.wi, wi_quantizers, y_q, wi_kernel, wi_bias)
    pre = checkpoint_name(pre, "ffn1")
    act_q, act_amax = run.act_quantize(pre, spec.activation, *wo_quantizers["x"])
    out, wo_q, wo_amax = fprop(run, spec.wo, wo_quantizers, act_q, wo_kernel, wo_bias)
    out = checkpoint_name(out, "ffn2")

    wi_saved = (run.keep_x(y_q), run.keep_kernel(wi_q), y_amax, wi_amax)
    wo_saved = (run.keep_x(act_q), run.keep_kernel(wo_q), act_amax, wo_amax)
    return out, (x, stats, scale, ln_bias, pre, wi_saved, wo_saved, states)


def _backward(spec: _Spec, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, stats, scale, ln_bias, pre, (y_q, wi_q, y_amax, wi_amax), (act_q, wo_q, act_amax, wo_amax), states = saved
    run = primitives(spec.wi.backend)
    wi_quantizers = GemmQuantizers(spec.wi.recipe, states[0])
    wo_quantizers = GemmQuantizers(spec.wo.recipe, states[1])

    g_q, dwo_bias, g_amax = quantize_gradient(run, spec.wo, wo_quantizers, g)
    dact, dwo_kernel = dgrad_wgrad(run, spec.wo, act_q, wo_q, g_q)
    dact = constrain(dact, spec.ffn_axes)
    dpre_q, dwi_bias, dpre_amax = run.act_backward_quantize(
        dact, pre, spec.activation, *wi_quantizers["grad"], bias_dtype=spec.wi.bias_dtype
    )
    dy, dwi_kernel = dgrad_wgrad(run, spec.wi, y_q, wi_q, dpre_q)
    dx, dscale, dln_bias = run.norm_backward(dy, x, stats, scale, ln_bias, spec.norm)

    next_states = (
        wi_quantizers.next_state({"x": y_amax, "kernel": wi_amax, "grad": dpre_amax}),
        wo_quantizers.next_state({"x": act_amax, "kernel": wo_amax, "grad": g_amax}),
    )
    return dx, dscale, dln_bias, dwi_kernel, dwi_bias, dwo_kernel, dwo_bias, next_states


_layernorm_mlp.defvjp(_forward, _backward)
