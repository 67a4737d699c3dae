"""Normalization, first projection, activation, second projection: the feed-forward block as one op."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.ad_checkpoint import checkpoint_name

from jax_te._validation import checked
from jax_te.ops.linear import gemms
from jax_te.ops.linear.gemms import LinearResiduals, Operand
from jax_te.ops.linear.norm_and_activation import Activation, NormSpec
from jax_te.ops.linear.norm_steps import norm_backward, normed_operand
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.resolve import Layer, LinearArgs, Norm, check_differentiated, run_op, why_once
from jax_te.ops.linear.spec import LinearWeights, OpSpec
from jax_te.ops.named import named
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.quantize import GemmState
from jax_te.recipe import Recipe
from jax_te.sharding import constrain
from jax_te.typing import Array, BackendName


class MlpOptions(NamedTuple):
    """The static options of `layernorm_mlp`.

    Args:
        norm: kind of norm, its epsilon, and whether the scale is an offset from 1.
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


@checked
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
        x: ``[..., h]`` fp32, bf16, fp16 or fp64: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        wi: kernel ``[h, n_act, f]`` and bias ``[n_act, f]`` or None, with quantizer state and ``grad_sink``;
            ``n_act`` is the activation's number of components.
        wo: kernel ``[f, h]`` and bias ``[h]`` or None, likewise.
        options: norm, activation, and the options of the two linear layers.
        recipe, backend: see `dense`.

    Returns:
        ``[..., h]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, TypeError, BackendUnavailableError: see `dense`.

    Source: ``transformer_engine.jax.layernorm_mlp.layernorm_mlp``. There FFN2's output gradient uses FFN1's
    quantizer and the other way round; here each state belongs to its own layer.

    >>> import jax.numpy as jnp
    >>> from jax_te.ops import LinearWeights
    >>> wi, wo = LinearWeights(jnp.ones((16, 2, 32))), LinearWeights(jnp.ones((32, 16)))
    >>> options = MlpOptions(activation=Activation("swiglu"))
    >>> layernorm_mlp(jnp.ones((4, 16)), jnp.ones(16), None, wi, wo, options=options).shape
    (4, 16)
    """
    n_act = len(options.activation.parts())
    if wi.kernel.ndim != 3 or wi.kernel.shape[1] != n_act:
        raise ValueError(
            f"layernorm_mlp: wi_kernel must be [h, {n_act}, f] for {options.activation.name!r}, got {wi.kernel.shape}"
        )
    layers = (
        Layer("layernorm_mlp (wi)", x.shape, wi, options.wi),
        Layer("layernorm_mlp (wo)", (*x.shape[:-1], wi.kernel.shape[2]), wo, options.wo),
    )
    norm, activation = Norm(options.norm, scale, ln_bias), options.activation
    given = {"norm": norm, "activation": activation, "recipe": recipe, "backend": backend}
    return run_op(_layernorm_mlp, "layernorm_mlp", x, layers, **given)


def _as_rows(spec: OpSpec, x: Array, rows: tuple[int, ...] = (-1,)) -> Array:
    """Return ``x [..., k]`` as ``[*rows, k]`` if the plan is by rows (`Plan.by_rows`), else unchanged."""
    return x.reshape(*rows, x.shape[-1]) if spec.layers[0].plan.is_by_rows else x


def _fwd(spec: OpSpec, args: LinearArgs) -> tuple[Array, Any]:
    _, norm, (wi, wo) = args
    shape, x = args.x.shape, _as_rows(spec, args.x)
    operand, stats = normed_operand(spec.layers[0], spec.norm, x, *norm, wi.state)  # type: ignore[arg-type]
    pre, saved = gemms.forward(spec.layers[0], operand, wi)
    # te.jax's names, so that remat policies written for it apply here.
    pre = checkpoint_name(pre, "ffn1")
    out, wo_saved = gemms.forward(spec.layers[1], _activated(spec, pre, wo.state), wo)
    # A quantizing kernel writes several arrays: if one had no name, recomputation would run the kernel again.
    saved, stats, wo_saved = named((saved, stats, wo_saved), "quantized", given=(wi, wo))
    saved, stats = _input_named(saved, "norm"), checkpoint_name(stats, "norm")
    wo_saved = _input_named(wo_saved, "activation")
    return _as_rows(spec, out, shape[:-1]), ((x, stats, *norm), pre, saved, wo_saved)


def _input_named(residuals: LinearResiduals, name: str) -> LinearResiduals:
    """Return residuals whose input, with its scale and amax, has a checkpoint name."""
    x, used = checkpoint_name((residuals.x, residuals.x_used), name)
    return residuals._replace(x=x, x_used=used)


def _activated(spec: OpSpec, pre: Array, state: GemmState | None) -> Operand:
    """Return the activated tensor as the second layer's GEMMs read it."""
    linear = spec.layers[1]
    assert spec.activation is not None
    how = gemms.fused_quantization(linear, state, "x")
    if how is None:
        return gemms.make_operand(linear, "x", linear.primitives.act(pre, spec.activation), state, axis=-1)
    written, amax = linear.primitives.act_quantize(pre, spec.activation, how)
    return gemms.adopt(linear, "x", written, (how.scale, amax))


def _bwd(spec: OpSpec, residuals: Any, g: Array) -> tuple[LinearArgs, Any]:
    (normed, pre, wi_residuals, wo_residuals), (wi, wo) = residuals, spec.layers
    shape, g = g.shape, _as_rows(spec, g)
    grad, dbias = gemms.grad_operand(wo, g, wo_residuals.state)
    # The second layer first, as in any chain rule; both kernels are gathered behind the op's own gradient, so that no
    # all-gather of backward begins in forward.
    dz, dwo, wo_sink = gemms.backward(wo, wo_residuals, grad, dbias, after=g)
    dpre, dbias = _activation_backward(spec, pre, dz, wi_residuals.state)
    dy, dwi, wi_sink = gemms.backward(wi, wi_residuals, dpre, dbias, after=g)
    assert spec.norm is not None
    dx, dnorm = norm_backward(wi.primitives, wi.plan, normed, dy, spec.norm)
    return LinearArgs(_as_rows(spec, dx, shape[:-1]), dnorm, (dwi, dwo)), (wi_sink, wo_sink)


def _activation_backward(spec: OpSpec, pre: Array, dz: Array, state: GemmState | None) -> tuple[Operand, Array | None]:
    """Return the gradient of the first layer's output ``pre`` as an operand, and its sum over rows, the bias gradient.

    ``state`` is the first layer's.
    """
    linear = spec.layers[0]
    assert spec.activation is not None
    if linear.plan.constrained:
        dz = constrain(dz, spec.layers[1].options.x_axes)
    how = gemms.fused_quantization(linear, state, "grad")
    if how is None:
        return gemms.grad_operand(linear, linear.primitives.act_backward(dz, pre, spec.activation), state)
    back, dtype = linear.primitives.act_backward_quantize, linear.bias_dtype
    written, dbias, amax = back(dz, pre, spec.activation, how, bias_dtype=dtype)
    return gemms.adopt(linear, "grad", written, (how.scale, amax)), dbias


_layernorm_mlp = sharded_vjp(_fwd, _bwd, name="ffn2", check=check_differentiated, once=why_once)
