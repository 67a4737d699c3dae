"""Arithmetic of per-tensor scales and amax histories, and the context in which they stay as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.recipe import DelayedScaling, fp8_max
from jax_te.typing import Array, DTypeLike

_MANTISSA = 0x7FFFFF

AmaxState = dict[str, Array]
"""``{"scale": f32[], "amax_history": f32[n]}``: the scale last used, and the newest amax in slot 0.

With a scale for each of ``d`` parts of the batch, ``f32[d]`` and ``f32[d, n]``."""


class AmaxRule(NamedTuple):
    """Computation of a delayed scale from a history, see the same fields of `jax_te.recipe.DelayedScaling`."""

    margin: int
    amax_compute_algo: str


def amax(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Return the largest absolute value of ``x`` over ``axis`` (None: all axes) as fp32, nan if any element is.

    An amax below fp32's least normal number is 0, on every device. The amax of a sharded global array spans every mesh
    axis.

    >>> float(amax(jnp.array([-3.0, 2.0])))
    3.0
    """
    return _amax(x, axis)


# Jitted, as is `scale_in_use`: each quantizer of a model calls both, and JAX traces and lowers one function for all
# tensors of one type. XLA inlines the calls.
@functools.partial(jax.jit, static_argnames="axis")
def _amax(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    largest = _largest_magnitude(x, axis)
    # CPUs and GPUs differ in whether they flush numbers below the least normal one to 0, which is less than it, too.
    return jnp.where(largest < jnp.finfo(jnp.float32).tiny, 0.0, largest)


def _largest_magnitude(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    """Return the largest absolute value as fp32, nan if any element is; it may be a subnormal number."""
    # The maximum is taken of bit patterns, which are ordered as the values are, nan above inf. A maximum of floats
    # loses nan where XLA splits the reduction: over vector lanes on CPU from some thousand elements on, over devices.
    # Those of 16 bits are not widened first: XLA's kernel that also computes such an ``x`` would then compute it twice
    # on a GPU, which takes a third longer for the derivative of GELU and twice as long for that of SwiGLU.
    word = jnp.uint16 if x.dtype.itemsize == 2 else jnp.int32
    wide = x if word == jnp.uint16 else x.astype(jnp.float32)
    bits = (jax.lax.bitcast_convert_type(wide, word) & (0x7FFF if word == jnp.uint16 else 0x7FFFFFFF)).astype(jnp.int32)
    # A maximum of no elements needs an initial value: the amax of an empty tensor is 0.
    bits = jnp.max(bits, axis=axis) if bits.size else jnp.max(bits, axis=axis, initial=0)
    return jax.lax.bitcast_convert_type(bits.astype(word), wide.dtype).astype(jnp.float32)


def max_or_nan(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Return the maximum of ``x`` over ``axis``, nan if any element is.

    >>> max_or_nan(jnp.array([[-3.0, 2.0], [jnp.nan, 1.0]]), axis=1).tolist()
    [2.0, nan]
    """
    # nan is tested for, because XLA on CPU loses it from maxima of floats over large arrays.
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis), jnp.nan, jnp.max(x, axis=axis))


def compute_scale(amax: Array, dtype: DTypeLike, *, margin: int = 0, old_scale: Array | None = None) -> Array:
    """Return ``max(dtype) / amax / 2**margin``; where amax is 0, inf or nan, the old scale.

    Without an old scale it is 1 where amax is 0. Where amax is inf or nan it is nan, so that the tensor's values are:
    quantization would make inf finite.

    If the quotient overflows fp32 (an amax below about 1e-36), the scale is the largest fp32 value. An amax below
    fp32's least normal number counts as 0.

    Args:
        amax: fp32, any shape.
        dtype: FP8 dtype that values are scaled into.
        margin: powers of two of headroom.
        old_scale: fp32, same shape as ``amax``.

    Source: Transformer Engine, delayed-scaling recipe.

    >>> float(compute_scale(jnp.float32(7.0), jnp.float8_e4m3fn))
    64.0
    """
    old = jnp.where(jnp.isfinite(amax), 1.0, jnp.nan) if old_scale is None else old_scale
    scale = fp8_max(dtype) / amax
    if margin:
        scale = scale / 2.0**margin
    # An infinite scale would turn the tensor's zeros into nan.
    scale = jnp.minimum(scale, jnp.finfo(jnp.float32).max)
    # Not `amax > 0`: whether a subnormal number is greater than 0 depends on the device.
    return jnp.where((amax >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(amax), scale, old)


def power_of_two_scale(amax: Array, dtype: DTypeLike) -> Array:
    """Return the largest power of two that is at most ``max(dtype) / amax`` and 2^127.

    It is 1 where amax is 0, and nan where it is inf or nan, see `compute_scale`.

    Args:
        amax: fp32, any shape.
        dtype: float8_e4m3fn or float8_e5m2.

    >>> float(power_of_two_scale(jnp.float32(3.5), jnp.float8_e4m3fn))
    128.0
    """
    scale = jnp.where(amax > 0.0, exponent_scale(amax, dtype), 1.0)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def exponent_scale(amax: Array, dtype: DTypeLike) -> Array:
    """Return the same as `power_of_two_scale` where amax is finite and not 0, and any number elsewhere.

    Pallas kernels call it, too.

    >>> float(exponent_scale(jnp.float32(3.5), jnp.float8_e4m3fn))
    128.0
    """
    # The scale is taken from exponents, not from a division, which on a GPU is not exact in fp32: a quotient that is a
    # power of two could come out just below it, and the scale would be half of what it should be.
    largest = int(np.float32(fp8_max(dtype)).view(np.int32))
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    less = ((bits & _MANTISSA) > (largest & _MANTISSA)).astype(jnp.int32)
    # The quotient's exponent is the difference of the exponents, and one less if amax has the larger mantissa.
    exponent = 127 + (largest >> 23) - (bits >> 23) - less
    return jax.lax.bitcast_convert_type(jnp.minimum(exponent, 254) << 23, jnp.float32)


def amax_rule_of(recipe: DelayedScaling) -> AmaxRule:
    """Return the rule of a recipe."""
    return AmaxRule(recipe.margin, recipe.amax_compute_algo)


@functools.partial(jax.jit, static_argnames=("dtype", "rule"))
def scale_in_use(state: AmaxState, dtype: DTypeLike, rule: AmaxRule) -> Array:
    """Return the scale of the next use of ``state``: fp32 ``[]``, or ``[d]`` for parts of the batch."""
    history = _finite_amaxes(state["amax_history"])
    chosen = history[..., 0] if rule.amax_compute_algo == "most_recent" else _largest_magnitude(history, -1)
    scale = compute_scale(chosen, dtype, margin=rule.margin, old_scale=state["scale"])
    # The scale is part of the state's next value, too. Without the barrier XLA for GPUs computes it there again from
    # its parts, in kernels for many states, which takes it long to put together and to compile.
    return jax.lax.optimization_barrier(scale)


# Jitted as `_amax` is: a program has one function for all states of one type.
@jax.jit
def next_amax_state(state: AmaxState, scale: Array, new_amax: Array) -> AmaxState:
    """Return the state after a use with ``scale`` on a tensor with amax ``new_amax``; the oldest amax drops out.

    A new amax that is not finite is in it, for the step to see; `write_back` keeps the old state instead.
    """
    new_amax = _of_batch(new_amax, scale)
    # Not a roll whose first slot is set: XLA lowers that to a scatter, which takes longer to compile and to run.
    earlier = _finite_amaxes(state["amax_history"][..., :-1])
    return {"scale": scale, "amax_history": jnp.concatenate([new_amax[..., None], earlier], axis=-1)}


@jax.custom_batching.custom_vmap
def _of_batch(new_amax: Array, scale: Array) -> Array:
    """Return ``new_amax``; under ``jax.vmap`` of calls that share one scale, the largest amax of all of them.

    Such calls share one state, and its gradient, which is the next state, would be a sum over the calls.
    """
    return new_amax


@_of_batch.def_vmap
def _of_batch_rule(axis_size: int, batched: list[bool], new_amax: Array, scale: Array) -> tuple[Array, bool]:
    of_each, states_of_each = batched
    if states_of_each:
        return _of_batch(new_amax, scale), of_each
    return _of_batch(max_or_nan(new_amax, axis=0), scale), False  # again, for a vmap around this one


def _finite_amaxes(history: Array) -> Array:
    """Return a history with 0, which says nothing of a scale, for inf and nan.

    They are in it where a loop wrote a next state to the model without `write_back`, and would keep the scale as it is
    until they drop out.
    """
    return jnp.where(jnp.isfinite(history), history, 0.0)


# A user context is part of the jit cache key: functions traced with frozen scales are traced again without them.
scales_are_frozen = jax.make_user_context(False)


@contextlib.contextmanager
def frozen_scales() -> Iterator[None]:
    """Yield with the state of delayed scaling frozen in every call that is traced or made inside.

    The scales stay those of the histories that the state has: backward takes no amax, the state's gradient is the state
    itself, and the state may be left out of what is differentiated. A call outside of the context that leaves it out
    raises `jax_te.errors.QuantizerStateError`, since its scales would never fit what it quantizes.

    >>> from jax_te.ops import dense
    >>> from jax_te.quantize import init_gemm_state
    >>> recipe = DelayedScaling(amax_history_len=1)
    >>> state, x = init_gemm_state(recipe), jnp.ones((16, 16))
    >>> with frozen_scales():
    ...     dx = jax.grad(lambda x: jnp.sum(dense(x, x, recipe=recipe, state=state)))(x)
    """
    with scales_are_frozen(True):
        yield


attention_scales_are_current = jax.make_user_context(False)


@contextlib.contextmanager
def current_attention_scales() -> Iterator[None]:
    """Yield with all scales of FP8 attention computed from the tensors of the call, those that are state, too.

    The state's next value then has the amaxes of tensors that are quantized well, whatever its histories are: under the
    scale 1 of empty ones most gradients would be 0, and so would be the gradients that follow from these. A pass
    whose kernels write tensors quantized runs first for their amaxes: forward runs twice, and backward three times,
    since the gradients of queries, keys and values follow from the quantized gradient of the scores.

    >>> from jax_te.quantize import as_float32, init_attention_state, with_max_gradients
    >>> from jax_te.recipe import DelayedScaling
    >>> from jax_te.ops import dot_product_attention
    >>> recipe, x = DelayedScaling(amax_history_len=1, fp8_dpa=True), jnp.ones((1, 128, 1, 128))
    >>> def loss(state):
    ...     return 2.0**-20 * jnp.sum(dot_product_attention((x, x, x), recipe=recipe, state=state))
    >>> with current_attention_scales():
    ...     state = jax.grad(loss, allow_int=True)(with_max_gradients(init_attention_state(recipe)))
    >>> as_float32(state)["do"]["amax_history"][0] == 2.0**-20
    Array(True, dtype=bool)
    """
    with attention_scales_are_current(True):
        yield
