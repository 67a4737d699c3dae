"""The linear transformation and its quantized form, alone and after a norm that writes its output quantized."""

from __future__ import annotations

from typing import Any

from jax_te._validation import checked
from jax_te.ops.linear import gemms
from jax_te.ops.linear.gemms import LinearResiduals
from jax_te.ops.linear.norm_and_activation import NormSpec
from jax_te.ops.linear.norm_steps import norm_backward, normed_operand
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.resolve import Layer, LinearArgs, Norm, check_differentiated, run_op, why_once
from jax_te.ops.linear.spec import GivenSink, LinearWeights, OpSpec
from jax_te.ops.named import named
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.quantize import GemmState, QuantizedKernel
from jax_te.recipe import Recipe
from jax_te.typing import Array, BackendName


@checked
def dense(
    x: Array,
    kernel: Array | QuantizedKernel,
    bias: Array | None = None,
    *,
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    grad_sink: GivenSink | None = None,
    options: LinearOptions = LinearOptions(),
    backend: BackendName | None = None,
) -> Array:
    """Return ``x @ kernel + bias``, with its three GEMMs (forward, input gradient, kernel gradient) quantized.

    Args:
        x: ``[..., k]`` fp32, bf16, fp16 or fp64: the compute dtype.
        kernel: ``[k, *n]`` in any float dtype; without a recipe it is cast to the compute dtype. Or the same quantized
            before the call, see `quantize_kernel`.
        bias: ``[*n]`` or None.
        recipe: None for high precision. FP8 needs ``k`` and ``prod(n)`` to be multiples of 16
            (``recipe.alignment``). Another number of tokens is padded with zeros inside, on a mesh each device's.
        state: the recipe's state, if it has any; its gradient is its next value.
        grad_sink: ``[k, *n]``, an array whose values are ignored. If it is given, the kernel's gradient is returned as
            its gradient, in its dtype.
        options: logical axes of input, kernel and output, and more: see `LinearOptions`.
        backend: None for the ambient one, see `use_backend`.

    Returns:
        ``[..., *n]`` in the dtype of ``x``. The gradient of ``kernel`` is accumulated in fp32 and has the kernel's
        dtype.

    Raises:
        ValueError: for shapes that do not fit.
        QuantizerStateError: if the recipe has state and none is given.
        TypeError: for an input that is not floating point; if a quantized kernel is differentiated and no
            ``grad_sink`` is given.
        BackendUnavailableError: if the requested backend cannot run it.

    Source: ``transformer_engine.jax.dense.dense``.

    >>> import jax.numpy as jnp
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> dense(jnp.ones((2, 8, 32)), jnp.ones((32, 16)), recipe=Float8CurrentScaling()).shape
    (2, 8, 16)
    """
    layer = Layer("dense", x.shape, LinearWeights(kernel, bias, state, grad_sink), options)
    return run_op(linear_op, "dense", x, (layer,), recipe=recipe, backend=backend)


@checked
def layernorm_dense(
    x: Array,
    scale: Array,
    ln_bias: Array | None,
    linear: LinearWeights,
    *,
    norm: NormSpec = NormSpec(),
    recipe: Recipe | None = None,
    options: LinearOptions = LinearOptions(),
    backend: BackendName | None = None,
) -> Array:
    """Return ``norm(x) @ kernel + bias``, see `layernorm` and `dense`.

    Args:
        x: ``[..., h]`` fp32, bf16, fp16 or fp64: the compute dtype.
        scale, ln_bias: ``[h]``; the bias may be None and must be for RMS norm.
        linear: kernel ``[h, *n]``, bias, quantizer state and ``grad_sink``.
        norm: kind of norm, its epsilon, and whether the scale is an offset from 1.
        recipe, options, backend: see `dense`; the quantized input is the norm's output.

    Returns:
        ``[..., *n]`` in the dtype of ``x``.

    Raises:
        ValueError, QuantizerStateError, TypeError, BackendUnavailableError: see `dense`.

    Source: ``transformer_engine.jax.layernorm_dense.layernorm_dense``.

    >>> import jax.numpy as jnp
    >>> from jax_te.ops import LinearWeights
    >>> layernorm_dense(jnp.ones((4, 16)), jnp.ones(16), jnp.zeros(16), LinearWeights(jnp.ones((16, 8)))).shape
    (4, 8)
    """
    layer = Layer("layernorm_dense", x.shape, linear, options)
    in_front = Norm(norm, scale, ln_bias)
    return run_op(linear_op, "layernorm_dense", x, (layer,), norm=in_front, recipe=recipe, backend=backend)


def _fwd(spec: OpSpec, args: LinearArgs) -> tuple[Array, Any]:
    x, norm, (weights,) = args
    (linear,), stats, original = spec.layers, None, None
    if spec.norm is None:
        # The input is not written as an operand: it comes from outside of the op.
        original = x
        operand = gemms.make_operand(linear, "x", x, weights.state, axis=-1)
    else:
        operand, stats = normed_operand(linear, spec.norm, x, *norm, weights.state)  # type: ignore[misc]
    y, saved = gemms.forward(linear, operand, weights, original)
    # The kernel that quantizes a norm's output writes the statistics, too; without a name they would be recomputed.
    stats, saved = named((stats, saved), "quantized", given=weights)
    normed = None if norm is None else (x, stats, *norm)
    return y, (normed, saved)


def _bwd(spec: OpSpec, residuals: tuple[Any, LinearResiduals], g: Array) -> tuple[LinearArgs, Any]:
    (normed, saved), (linear,), dnorm = residuals, spec.layers, None
    dx, weights, sink = gemms.backward(linear, saved, *gemms.grad_operand(linear, g, saved.state), after=g)
    if spec.norm is not None:
        dx, dnorm = norm_backward(linear.primitives, linear.plan, normed, dx, spec.norm)
    return LinearArgs(dx, dnorm, (weights,)), (sink,)


linear_op = sharded_vjp(_fwd, _bwd, name="gemm", check=check_differentiated, once=why_once)
