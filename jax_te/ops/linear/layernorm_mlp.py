"""Normalization, first projection, activation, second projection: the feed-forward block as one op."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.config import ActivationParams
from jax_te.ops.backend import BackendName, select
from jax_te.ops.linear.gemm import GemmSpec, LinearGemms, cotangents, gemm_spec
from jax_te.ops.linear.layernorm import check_norm
from jax_te.ops.linear.layernorm_dense import normed_operand
from jax_te.ops.linear.plan import GemmRanks, gemm_ranks, kernel_layout, norm_ranks, place_linear
from jax_te.ops.linear.quantize_kernel import ready_kernel
from jax_te.ops.linear.spec import NormSpec, activation_parts, check_activation_params
from jax_te.ops.linear.split_gemms import linear_gemms
from jax_te.quantize import GemmState, QuantizedKernel
from jax_te.recipe import Recipe
from jax_te.sharding import auto_region, constrain
from jax_te.sharding.internal import PER_RANK, WHOLE, on_ranks, place
from jax_te.typing import Array, LogicalAxes

States = tuple[GemmState | None, GemmState | None]
Gradients = tuple[Array | None, Array | None]
Kernel = Array | QuantizedKernel


def layernorm_mlp(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Kernel,
    wi_bias: Array | None,
    wo_kernel: Kernel,
    wo_bias: Array | None,
    *,
    norm: NormSpec = NormSpec(),
    activation: str = "gelu",
    activation_params: ActivationParams | None = None,
    recipe: Recipe | None = None,
    states: States | None = None,
    ffn_axes: LogicalAxes | None = None,
    out_axes: LogicalAxes | None = None,
    wi_axes: LogicalAxes | None = None,
    wo_axes: LogicalAxes | None = None,
    gradients: Gradients = (None, None),
    names: tuple[str | None, str | None] = (None, None),
    backend: BackendName | None = None,
) -> Array:
    """``act(norm(x) @ wi + wi_bias) @ wo + wo_bias``; every GEMM operand is quantized where it is produced.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        wi_kernel, wi_bias: ``[h, n_act, f]`` and ``[n_act, f]`` or None; ``n_act`` is the activation's number of
            components. Either kernel may be quantized beforehand.
        wo_kernel, wo_bias: ``[f, h]`` and ``[h]`` or None.
        activation: a key of `jax_te.config.ACTIVATIONS`, see `jax_te.ops.activation`.
        activation_params: of ``"clamped_swiglu"``. None: ``ActivationParams()``.
        states: the recipe's states of the two linear layers, if it has any; their gradients are their next values.
        ffn_axes: logical axes of the activated tensor ``[..., f]``.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        wi_axes, wo_axes: logical axes of the kernels, which their gradients are constrained to.
        gradients: where the kernels' gradients go, see `dense`.
        names: under which the two layers' tensors are observed.
        norm, recipe, backend: as in `layernorm_dense`.

    Returns:
        ``[..., h]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, BackendUnavailableError: as `dense`.

    Source: ``transformer_engine.jax.layernorm_mlp.layernorm_mlp``. There FFN2's output gradient uses FFN1's
    quantizer and the other way round; here each state belongs to its own layer.

    >>> import jax.numpy as jnp
    >>> wi, wo = jnp.ones((16, 2, 32)), jnp.ones((32, 16))
    >>> layernorm_mlp(jnp.ones((4, 16)), jnp.ones(16), None, wi, None, wo, None, activation="swiglu").shape
    (4, 16)
    """
    check_norm("layernorm_mlp", x.shape[-1], scale, ln_bias, norm)
    parts = len(activation_parts(activation))
    if wi_kernel.ndim != 3 or wi_kernel.shape[1] != parts:
        raise ValueError(f"layernorm_mlp: wi_kernel must be [h, {parts}, f] for {activation!r}, got {wi_kernel.shape}")
    check_activation_params(activation, activation_params)
    states = (None, None) if states is None else states
    wi_kernel = ready_kernel(wi_kernel, gradients[0], recipe)
    wo_kernel = ready_kernel(wo_kernel, gradients[1], recipe)
    wide_axes = None if ffn_axes is None else (*ffn_axes[:-1], "components", ffn_axes[-1])
    ffn_shape = (*x.shape[:-1], wi_kernel.shape[2])
    wi_ranks, wo_ranks = _mlp_ranks(
        norm_ranks(
            gemm_ranks(
                x.shape, wi_kernel, x_axes=out_axes, kernel_axes=wi_axes, out_axes=wide_axes, recipe=recipe,
                state=states[0],
            )
        ),
        gemm_ranks(
            ffn_shape, wo_kernel, x_axes=ffn_axes, kernel_axes=wo_axes, out_axes=out_axes, recipe=recipe,
            state=states[1],
        ),
    )  # fmt: skip
    chosen = select("layernorm_mlp", recipe=recipe, backend=backend, ranks=wi_ranks)
    spec = _Spec(
        norm=norm,
        activation=activation,
        activation_params=activation_params,
        ffn_axes=ffn_axes,
        wi=gemm_spec(
            "layernorm_mlp (wi)", x.shape, wi_kernel, wi_bias, recipe=recipe, backend=chosen, out_axes=wide_axes,
            kernel_axes=wi_axes, x_dtype=x.dtype, gradient=gradients[0], name=names[0], ranks=wi_ranks,
        ),
        wo=gemm_spec(
            "layernorm_mlp (wo)", ffn_shape, wo_kernel, wo_bias, recipe=recipe, backend=chosen, out_axes=out_axes,
            kernel_axes=wo_axes, x_dtype=x.dtype, gradient=gradients[1], name=names[1], ranks=wo_ranks,
        ),
    )  # fmt: skip
    for gemm, state in zip((spec.wi, spec.wo), states, strict=True):
        LinearGemms(gemm, state)  # raises for a missing state
    fn = functools.partial(_layernorm_mlp, spec)
    if spec.wi.ranks is None or spec.wo.ranks is None:
        return auto_region(fn, out_axes)(x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states, gradients)
    scale, ln_bias = place((scale, ln_bias), WHOLE, spec.wi.ranks.mesh)
    x = place(x, spec.wi.ranks.x, spec.wi.ranks.mesh)
    wi_kernel, wi_bias, wi_state = place_linear(spec.wi.ranks, wi_kernel, wi_bias, states[0])
    wo_kernel, wo_bias, wo_state = place_linear(spec.wo.ranks, wo_kernel, wo_bias, states[1])
    states = (wi_state, wo_state)
    return fn(x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states, gradients)


def _mlp_ranks(wi: GemmRanks | str | None, wo: GemmRanks | str | None) -> tuple[Any, Any]:
    """How both are split; where one of them cannot be, why, for both."""
    why_not = next((ranks for ranks in (wi, wo) if isinstance(ranks, str)), None)
    return (wi, wo) if why_not is None else (why_not, why_not)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    norm: NormSpec
    activation: str
    activation_params: ActivationParams | None
    ffn_axes: LogicalAxes | None
    wi: GemmSpec
    wo: GemmSpec

    def gemms(self, states: States) -> tuple[LinearGemms, LinearGemms]:
        return linear_gemms(self.wi, states[0]), linear_gemms(self.wo, states[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_mlp(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Kernel,
    wi_bias: Array | None,
    wo_kernel: Kernel,
    wo_bias: Array | None,
    states: States,
    gradients: Gradients,
) -> Array:
    return _forward(spec, x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states, gradients)[0]


def _forward(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Kernel,
    wi_bias: Array | None,
    wo_kernel: Kernel,
    wo_bias: Array | None,
    states: States,
    gradients: Gradients,
) -> tuple[Array, tuple[Any, ...]]:
    arrays = (x, scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias, states)
    wi, wo = spec.wi.ranks, spec.wo.ranks
    if wi is None or wo is None:
        out, saved = _run(spec, *arrays)
    else:
        layouts = (
            wi.x, WHOLE, WHOLE, kernel_layout(wi_kernel, wi.kernel), wi.bias, kernel_layout(wo_kernel, wo.kernel),
            wo.bias, WHOLE,
        )  # fmt: skip
        out, saved = on_ranks(_run, spec, wi.mesh, layouts, (wo.out, (PER_RANK,) * 3), arrays)
    return checkpoint_name(out, "ffn2"), (*saved, scale, ln_bias, states, gradients)


def _run(
    spec: _Spec,
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi_kernel: Kernel,
    wi_bias: Array | None,
    wo_kernel: Kernel,
    wo_bias: Array | None,
    states: States,
) -> tuple[Array, Any]:
    wi, wo = spec.gemms(states)
    y_forms, stats, y_amax = normed_operand(wi, x, scale, ln_bias, spec.norm)
    wi_forms, wi_amax = wi.kernel(wi_kernel)
    pre = checkpoint_name(wi.fprop(y_forms, wi_forms, wi_bias), "ffn1")

    if wo.fuses("x"):
        operand, act_amax = wo.run.act_quantize(
            pre, spec.activation, *wo.quantizers["x"], params=spec.activation_params, reduce=wo.reduce
        )
        act_forms = wo.adopt(operand, "x")
    else:
        activated = wo.run.act(pre, spec.activation, spec.activation_params)
        act_forms, act_amax = wo.operand(activated, "x", axis=-1)
    wo_forms, wo_amax = wo.kernel(wo_kernel)
    out = wo.fprop(act_forms, wo_forms, wo_bias)
    kept_y, kept_wi = wi.keep(y_forms, wi_forms)
    kept_act, kept_wo = wo.keep(act_forms, wo_forms)
    # A kernel that quantizes writes all of its group: one array without the name, and it would run again.
    normed, wi_kept, activated_kept, wo_kept = checkpoint_name(
        ((kept_y, stats, y_amax), (kept_wi, wi_amax), (kept_act, act_amax), (kept_wo, wo_amax)), "quantized"
    )
    kept_y, stats, y_amax = checkpoint_name(normed, "norm")
    kept_act, act_amax = checkpoint_name(activated_kept, "activation")
    (kept_wi, wi_amax), (kept_wo, wo_amax) = wi_kept, wo_kept
    operands = ((kept_y, kept_wi), y_amax, wi_amax), ((kept_act, kept_wo), act_amax, wo_amax)
    return out, ((x, stats), pre, operands)


def _backward(spec: _Spec, kept: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    normed, pre, operands, scale, ln_bias, states, gradients = kept
    arrays = (normed, pre, operands, scale, ln_bias, states, g)
    wi, wo = spec.wi.ranks, spec.wo.ranks
    if wi is None or wo is None:
        results = _run_backward(spec, *arrays)
    else:
        results = on_ranks(
            _run_backward,
            spec,
            wi.mesh,
            (PER_RANK, PER_RANK, PER_RANK, WHOLE, WHOLE, WHOLE, wo.out),
            (wi.x, WHOLE, WHOLE, wi.kernel, wi.bias, wo.kernel, wo.bias, WHOLE),
            arrays,
        )
    dx, dscale, dln_bias, dwi_kernel, dwi_bias, dwo_kernel, dwo_bias, next_states = results
    dwi_kernel, dwi_gradient = cotangents(spec.wi, dwi_kernel, gradients[0])
    dwo_kernel, dwo_gradient = cotangents(spec.wo, dwo_kernel, gradients[1])
    return (
        dx, dscale, dln_bias, dwi_kernel, dwi_bias, dwo_kernel, dwo_bias, next_states, (dwi_gradient, dwo_gradient)
    )  # fmt: skip


def _run_backward(
    spec: _Spec,
    normed: Any,
    pre: Array,
    operands: Any,
    scale: Array,
    ln_bias: Array | None,
    states: States,
    g: Array,
) -> tuple[Any, ...]:
    (x, stats), ((wi_kept, y_amax, wi_amax), (wo_kept, act_amax, wo_amax)) = normed, operands
    wi, wo = spec.gemms(states)
    for gemms in (wi, wo):
        gemms.begin_backward(g)
    g_forms, dwo_bias, g_amax = wo.gradient(g)
    dact, dwo_kernel = wo.backward(wo_kept, g_forms)
    dact = constrain(dact, spec.ffn_axes)
    if wi.fuses("grad"):
        operand, dwi_bias, dpre_amax = wi.run.act_backward_quantize(
            dact,
            pre,
            spec.activation,
            *wi.quantizers["grad"],
            bias_dtype=spec.wi.bias_dtype,
            params=spec.activation_params,
            reduce=wi.reduce,
        )
        dpre_forms, dwi_bias = wi.adopt(operand, "grad"), wi.bias_gradient(dwi_bias)
    else:
        dpre = wi.run.act_backward(dact, pre, spec.activation, spec.activation_params)
        dpre_forms, dwi_bias, dpre_amax = wi.gradient(dpre)
    dy, dwi_kernel = wi.backward(wi_kept, dpre_forms)
    dx, *dnorm = wi.run.norm_backward(dy, x, stats, scale, ln_bias, spec.norm)
    next_states = (
        wi.next_state({"x": y_amax, "kernel": wi_amax, "grad": dpre_amax}),
        wo.next_state({"x": act_amax, "kernel": wo_amax, "grad": g_amax}),
    )
    return dx, *wi.norm_gradients(*dnorm), dwi_kernel, dwi_bias, dwo_kernel, dwo_bias, next_states


_layernorm_mlp.defvjp(_forward, _backward)
