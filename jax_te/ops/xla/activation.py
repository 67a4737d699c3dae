"""Activations in plain JAX, fp32 (of fp64: fp64) inside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.config import ActivationParams, LimitedFunction
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.wide import wide_dtype
from jax_te.ops.xla.gemm import quantize_dbias, quantize_operand
from jax_te.quantize import Operand, Quantization
from jax_te.typing import Array, DTypeLike

_GELU = 2.0 * (2.0 / math.pi) ** 0.5
_gelu = jax.custom_jvp(functools.partial(jax.nn.gelu, approximate=True))


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Written out: arithmetic, not memory, limits the kernel on a GPU, and JAX's derivative has more of it. By a
    # sigmoid, (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps its digits where tanh is near -1.
    (x,), (dx,) = primals, tangents
    square = x * x
    s = jax.nn.sigmoid(_GELU * x * (1.0 + 0.044715 * square))
    return _gelu(x), dx * (s + s * (1.0 - s) * (_GELU * x) * (1.0 + 3 * 0.044715 * square))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}


_DEFAULT_PARAMS = ActivationParams()


def _clamped_silu(x: Array, params: ActivationParams) -> Array:
    x = _at_most(x, params.limit)
    return x * jax.nn.sigmoid(params.alpha * x)


def _clamped_linear(x: Array, params: ActivationParams) -> Array:
    return -_at_most(-_at_most(x, params.limit), params.limit) + params.linear_offset


def _at_most(x: Array, limit: float) -> Array:
    """Return the minimum, with the slope 1 where ``x`` is the limit, as in TE's kernels; jnp.minimum has 1/2 there."""
    return jnp.where(x > limit, limit, x)


def _apply(part: Any, x: Array, params: ActivationParams) -> Array:
    if isinstance(part, LimitedFunction):
        x = x if part.high is None else _at_most(x, part.high)
        x = x if part.low is None else -_at_most(-x, -part.low)
        return _apply(part.function, x, params) + part.offset
    if callable(part):
        y: Any = part(x)
        return y.astype(x.dtype)
    if part == "clamped_silu":
        return _clamped_silu(x, params)
    return _clamped_linear(x, params) if part == "clamped_linear" else _FUNCTIONS[part](x)


def _wide(x: Array, activation: Activation) -> Array:
    return act_of_parts(activation, [x[..., i, :] for i in range(x.shape[-2])])


def act_of_parts(activation: Activation, components: Sequence[Array]) -> Array:
    """Return the product of the functions of each component, in the components' dtype."""
    params = activation.params or _DEFAULT_PARAMS
    first, *others = zip(activation.parts(), components, strict=True)
    wide = _apply(*first, params)
    for part, x in others:
        wide = wide * _apply(part, x, params)
    return wide


def act(x: Array, activation: Activation) -> Array:
    """Return ``x [..., n_act, f]`` activated, ``[..., f]``: the product of the functions of each component."""
    return _wide(x.astype(wide_dtype(x.dtype)), activation).astype(x.dtype)


def act_quantize(x: Array, activation: Activation, how: Quantization) -> tuple[Operand, Array | None]:
    """Return `act`'s output as an operand, and its amax."""
    return quantize_operand(act(x, activation), how, axis=-1)


def act_backward_quantize(
    dz: Array, x: Array, activation: Activation, how: Quantization, *, bias_dtype: DTypeLike | None
) -> tuple[Operand, Array | None, Array | None]:
    """Return `act_backward`'s result as an operand, its bias gradient, summed in fp32, and its amax."""
    # The sum reads the rounded values: from the fp32 ones XLA would write them all out first.
    return quantize_dbias(act_backward(dz, x, activation), how, axis=x.ndim - 2, bias_dtype=bias_dtype)


def act_backward(dz: Array, x: Array, activation: Activation) -> Array:
    """Return the gradient of ``x [..., n_act, f]`` from ``dz [..., f]``, in the dtype of ``x``."""
    dtype = wide_dtype(x.dtype)
    _, vjp = jax.vjp(lambda x: _wide(x, activation), x.astype(dtype))
    return vjp(dz.astype(dtype))[0].astype(x.dtype)
