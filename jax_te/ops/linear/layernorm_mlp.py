"""Normalization, first projection, activation, second projection: the feed-forward block as one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.ad_checkpoint import checkpoint_name

from jax_te.ops.linear import gemms
from jax_te.ops.linear.dense import NormResiduals, norm_backward, normed_operand
from jax_te.ops.linear.gemms import LinearResiduals, Operand
from jax_te.ops.linear.resolve import Layer, LinearArgs, check_differentiated, check_norm, resolve_call
from jax_te.ops.linear.spec import Activation, LinearOptions, LinearSpec, LinearWeights, NormSpec
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.quantize import GemmState
from jax_te.recipe import Recipe
from jax_te.sharding import constrain
from jax_te.typing import Array, BackendName


class MlpOptions(NamedTuple):
    """The static options of `layernorm_mlp`.

    Args:
        norm: which norm, its epsilon, and whether the scale is an offset from 1.
        activation: see `jax_te.ops.activation`.
        wi, wo: options of the two linear layers. ``wi.out_axes`` are the logical axes of ``[..., n_act, f]``,
            ``wo.x_axes`` those of the activated tensor ``[..., f]``, ``wo.out_axes`` those of the result.

    >>> MlpOptions(activation=Activation("swiglu")).activation.name
    'swiglu'
    """

    norm: NormSpec = NormSpec()
    activation: Activation = Activation("gelu")
    wi: LinearOptions = LinearOptions()
    wo: LinearOptions = LinearOptions()


def layernorm_mlp(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    wi: LinearWeights,
    wo: LinearWeights,
    *,
    options: MlpOptions = MlpOptions(),
    recipe: Recipe | None = None,
    backend: BackendName | None = None,
) -> Array:
    """Return ``act(norm(x) @ wi + wi_bias) @ wo + wo_bias``; every GEMM operand is quantized where it is produced.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        wi: kernel ``[h, n_act, f]`` and bias ``[n_act, f]`` or None, with quantizer state and ``grad_sink``;
            ``n_act`` is the activation's number of components.
        wo: kernel ``[f, h]`` and bias ``[h]`` or None, likewise.
        options: norm, activation, and the options of the two linear layers.
        recipe, backend: as in `dense`.

    Returns:
        ``[..., h]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, TypeError, BackendUnavailableError: as `dense`.

    Source: ``transformer_engine.jax.layernorm_mlp.layernorm_mlp``. There FFN2's output gradient uses FFN1's
    quantizer and the other way round; here each state belongs to its own layer.

    >>> import jax.numpy as jnp
    >>> from jax_te.ops import LinearWeights
    >>> wi, wo = LinearWeights(jnp.ones((16, 2, 32))), LinearWeights(jnp.ones((32, 16)))
    >>> options = MlpOptions(activation=Activation("swiglu"))
    >>> layernorm_mlp(jnp.ones((4, 16)), jnp.ones(16), None, wi, wo, options=options).shape
    (4, 16)
    """
    check_norm("layernorm_mlp", x.shape[-1], scale, ln_bias, options.norm)
    n_act = len(options.activation.parts())
    if wi.kernel.ndim != 3 or wi.kernel.shape[1] != n_act:
        raise ValueError(
            f"layernorm_mlp: wi_kernel must be [h, {n_act}, f] for {options.activation.name!r}, got {wi.kernel.shape}"
        )
    layers = (
        Layer("layernorm_mlp (wi)", x.shape, wi, options.wi),
        Layer("layernorm_mlp (wo)", (*x.shape[:-1], wi.kernel.shape[2]), wo, options.wo),
    )
    call = resolve_call("layernorm_mlp", layers, x.dtype, recipe=recipe, backend=backend, behind_norm=True)
    return call.run(_layernorm_mlp, _Spec(options.norm, options.activation, *call.specs), x, (scale, ln_bias))


@dataclass(frozen=True)
class _Spec:
    norm: NormSpec
    activation: Activation
    wi: LinearSpec
    wo: LinearSpec

    @property
    def stored_quantized(self) -> tuple[bool, bool]:
        return self.wi.stored_quantized, self.wo.stored_quantized


class _Residuals(NamedTuple):
    norm: NormResiduals
    pre: Array
    wi: LinearResiduals
    wo: LinearResiduals


def _fwd(spec: _Spec, args: LinearArgs) -> tuple[Array, _Residuals]:
    x, (scale, ln_bias), (wi, wo) = args
    normed, stats = normed_operand(spec.wi, spec.norm, x, scale, ln_bias, wi.state)
    wi_kernel, wi_residual = gemms.kernel_operand(spec.wi, wi.kernel, wi.state)
    pre = checkpoint_name(gemms.fprop(spec.wi, normed, wi_kernel, wi.bias), "ffn1")
    activated = _activated(spec, pre, wo.state)
    wo_kernel, wo_residual = gemms.kernel_operand(spec.wo, wo.kernel, wo.state)
    out = gemms.fprop(spec.wo, activated, wo_kernel, wo.bias)
    # A kernel that quantizes writes all of its group: one array without the name, and it would run again.
    normed_saved, activated_saved, kernels = checkpoint_name(
        (
            (gemms.wgrad_residual(spec.wi, normed), stats, normed.used),
            (gemms.wgrad_residual(spec.wo, activated), activated.used),
            ((wi_residual, wi_kernel.used), (wo_residual, wo_kernel.used)),
        ),
        "quantized",
    )
    y, stats, y_used = checkpoint_name(normed_saved, "norm")
    z, z_used = checkpoint_name(activated_saved, "activation")
    (wi_residual, wi_used), (wo_residual, wo_used) = kernels
    return out, _Residuals(
        NormResiduals(x, stats, scale, ln_bias),
        pre,
        LinearResiduals(y, wi_residual, (y_used, wi_used), wi.state),
        LinearResiduals(z, wo_residual, (z_used, wo_used), wo.state),
    )


def _activated(spec: _Spec, pre: Array, state: GemmState | None) -> Operand:
    """Return the activated tensor as the second layer's GEMMs read it."""
    linear, how = spec.wo, gemms.quantization(spec.wo, state, "x")
    if gemms.fuses(linear, "x"):
        written, amax = linear.backend.act_quantize(pre, spec.activation, how)
        return gemms.adopt(linear, "x", written, (how.scale, amax))
    return gemms.make_operand(linear, "x", linear.backend.act(pre, spec.activation), how, axis=-1)


def _bwd(spec: _Spec, residuals: _Residuals, g: Array) -> tuple[LinearArgs, Any]:
    wi, wo = residuals.wi, residuals.wo
    grad, dwo_bias = gemms.grad_operand(spec.wo, g, wo.state)
    dz = gemms.dgrad(spec.wo, wo.kernel, grad, after=g)
    dwo_kernel, wo_sink = gemms.kernel_cotangents(spec.wo, gemms.wgrad(spec.wo, wo.x, grad))
    dpre, dwi_bias = _activation_backward(spec, residuals, dz)
    dy = gemms.dgrad(spec.wi, wi.kernel, dpre, after=g)
    dwi_kernel, wi_sink = gemms.kernel_cotangents(spec.wi, gemms.wgrad(spec.wi, wi.x, dpre))
    dx, *dnorm = norm_backward(spec.wi, spec.norm, residuals.norm, dy)
    weights = (
        LinearWeights(dwi_kernel, dwi_bias, gemms.next_state(spec.wi, wi, dpre)),
        LinearWeights(dwo_kernel, dwo_bias, gemms.next_state(spec.wo, wo, grad)),
    )
    return LinearArgs(dx, tuple(dnorm), weights), (wi_sink, wo_sink)


def _activation_backward(spec: _Spec, residuals: _Residuals, dz: Array) -> tuple[Operand, Array | None]:
    """Return the gradient of the first layer's output as an operand, and that of its bias."""
    linear, pre, state = spec.wi, residuals.pre, residuals.wi.state
    if linear.plan.constrained:
        dz = constrain(dz, spec.wo.options.x_axes)
    if not gemms.fuses(linear, "grad"):
        return gemms.grad_operand(linear, linear.backend.act_backward(dz, pre, spec.activation), state)
    how = gemms.quantization(linear, state, "grad")
    written, dbias, amax = linear.backend.act_backward_quantize(
        dz, pre, spec.activation, how, bias_dtype=linear.bias_dtype
    )
    return gemms.adopt(linear, "grad", written, (how.scale, amax)), gemms.bias_gradient(linear, dbias)


_layernorm_mlp = sharded_vjp(_fwd, _bwd, name="ffn2", check=check_differentiated)
