"""Activations in plain JAX, fp32 inside."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_te.ops.spec import activation_parts
from jax_te.ops.xla.gemm import quantize_operand, sum_rows
from jax_te.quantize import Operand, Quantizer
from jax_te.typing import Array, DTypeLike

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "linear": lambda x: x,
}


def _wide(x: Array, name: str) -> Array:
    parts = activation_parts(name)
    return functools.reduce(operator.mul, (_FUNCTIONS[part](x[..., i, :]) for i, part in enumerate(parts)))


def act(x: Array, name: str) -> Array:
    """``x [..., n_act, f]`` -> ``[..., f]``: the product of the named functions of each component, in the dtype of
    ``x``.
    """
    return _wide(x.astype(jnp.float32), name).astype(x.dtype)


def act_quantize(x: Array, name: str, quantizer: Quantizer | None, scale: Array | None) -> tuple[Operand, Array | None]:
    """`act`, its output as a GEMM operand, with the output's amax."""
    return quantize_operand(act(x, name), quantizer, scale, axis=-1)


def act_backward_dbias(dz: Array, x: Array, name: str, *, bias_dtype: DTypeLike | None) -> tuple[Array, Array | None]:
    """The input gradient ``[..., n_act, f]`` from ``dz [..., f]``, and its bias gradient, summed in fp32."""
    _, vjp = jax.vjp(lambda x: _wide(x, name), x.astype(jnp.float32))
    dx = vjp(dz.astype(jnp.float32))[0].astype(x.dtype)
    # The sum reads the rounded values: from the fp32 ones XLA would write them all out first.
    return dx, None if bias_dtype is None else sum_rows(dx, x.ndim - 2, bias_dtype)


def act_backward_quantize(
    dz: Array, x: Array, name: str, quantizer: Quantizer | None, scale: Array | None, *, bias_dtype: DTypeLike | None
) -> tuple[Operand, Array | None, Array | None]:
    """`act_backward_dbias` with the input gradient as an operand, and its amax."""
    dx, dbias = act_backward_dbias(dz, x, name, bias_dtype=bias_dtype)
    operand, dx_amax = quantize_operand(dx, quantizer, scale, axis=-2)
    return operand, dbias, dx_amax


def act_backward(dz: Array, x: Array, name: str) -> Array:
    """The input gradient ``[..., n_act, f]`` in the dtype of ``x``."""
    return act_backward_dbias(dz, x, name, bias_dtype=None)[0]
