"""Activations in plain JAX, fp32 inside."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_te.config import ActivationParams
from jax_te.ops.linear.spec import activation_parts
from jax_te.ops.xla.gemm import Reduce, quantize_operand, sum_rows
from jax_te.quantize import Operand, Quantizer
from jax_te.typing import Array, DTypeLike

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}


def _clamped_silu(x: Array, params: ActivationParams) -> Array:
    x = _at_most(x, params.limit)
    return x * jax.nn.sigmoid(params.alpha * x)


def _clamped_linear(x: Array, params: ActivationParams) -> Array:
    return -_at_most(-_at_most(x, params.limit), params.limit) + params.linear_offset


def _at_most(x: Array, limit: float) -> Array:
    """The minimum, with the slope 1 where ``x`` is the limit, as in TE's kernels; jnp.minimum has 1/2 there."""
    return jnp.where(x > limit, limit, x)


def _apply(part: str, x: Array, params: ActivationParams) -> Array:
    if part == "clamped_silu":
        return _clamped_silu(x, params)
    return _clamped_linear(x, params) if part == "clamped_linear" else _FUNCTIONS[part](x)


def _wide(x: Array, name: str, params: ActivationParams | None) -> Array:
    parts, params = activation_parts(name), params or ActivationParams()
    return functools.reduce(operator.mul, (_apply(part, x[..., i, :], params) for i, part in enumerate(parts)))


def act(x: Array, name: str, params: ActivationParams | None = None) -> Array:
    """``x [..., n_act, f]`` -> ``[..., f]``: the product of the named functions of each component, in the dtype of
    ``x``.
    """
    return _wide(x.astype(jnp.float32), name, params).astype(x.dtype)


def act_quantize(
    x: Array,
    name: str,
    quantizer: Quantizer | None,
    scale: Array | None,
    *,
    params: ActivationParams | None = None,
    reduce: Reduce | None = None,
) -> tuple[Operand, Array | None]:
    """`act`, its output as a GEMM operand, with the output's amax."""
    return quantize_operand(act(x, name, params), quantizer, scale, axis=-1, reduce=reduce)


def act_backward_dbias(
    dz: Array, x: Array, name: str, *, bias_dtype: DTypeLike | None, params: ActivationParams | None = None
) -> tuple[Array, Array | None]:
    """The input gradient ``[..., n_act, f]`` from ``dz [..., f]``, and its bias gradient, summed in fp32."""
    _, vjp = jax.vjp(lambda x: _wide(x, name, params), x.astype(jnp.float32))
    dx = vjp(dz.astype(jnp.float32))[0].astype(x.dtype)
    # The sum reads the rounded values: from the fp32 ones XLA would write them all out first.
    return dx, None if bias_dtype is None else sum_rows(dx, x.ndim - 2, bias_dtype)


def act_backward_quantize(
    dz: Array,
    x: Array,
    name: str,
    quantizer: Quantizer | None,
    scale: Array | None,
    *,
    bias_dtype: DTypeLike | None,
    params: ActivationParams | None = None,
    reduce: Reduce | None = None,
) -> tuple[Operand, Array | None, Array | None]:
    """`act_backward_dbias` with the input gradient as an operand, and its amax."""
    dx, dbias = act_backward_dbias(dz, x, name, bias_dtype=bias_dtype, params=params)
    operand, dx_amax = quantize_operand(dx, quantizer, scale, axis=-2, reduce=reduce)
    return operand, dbias, dx_amax


def act_backward(dz: Array, x: Array, name: str, params: ActivationParams | None = None) -> Array:
    """The input gradient ``[..., n_act, f]`` in the dtype of ``x``."""
    return act_backward_dbias(dz, x, name, bias_dtype=None, params=params)[0]
