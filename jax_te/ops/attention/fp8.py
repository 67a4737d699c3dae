"""FP8 attention as an op: scales, quantized residuals, and the next state of the scales.

Keys and values are centred first: their mean over the sequence is taken away, and that of the values is added to the
output again. Exact attention does not change by it, since a softmax does not by what all keys of a query share, and
adds up to 1; nor do its gradients. FP8 does. Backward subtracts from each key's gradient the mean ``sum(out * do)``,
whose error, that of the rounded output, meets the sum of all keys in the gradient of a query: with means as large as
the deviations from them that gradient was off by 0.87 of its size at 4,096 positions, and is by 0.06 so.

The steps between the quantized operands and the quantized results are those of plain JAX (`jax_te.ops.xla`) or of
cuDNN's kernels. On a mesh each device runs its own examples and heads; where the sequence is split, devices exchange
FP8 codes (`context_parallel.fp8_steps`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.errors import QuantizerStateError
from jax_te.ops.attention.context_parallel import fp8_steps
from jax_te.ops.attention.fp8_mean import codes_with_mean
from jax_te.ops.attention.fp8_types import Amaxes, Fp8Call, Fp8Operands, Scales
from jax_te.ops.attention.spec import QKV, unpack
from jax_te.ops.first_order import why_quantized
from jax_te.ops.named import named
from jax_te.ops.overflow import show_overflow
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.quantize import (
    AttentionState,
    AttentionTensor,
    QuantizedTensor,
    amax,
    check_gradients_merge,
    exponent_scale,
)
from jax_te.sharding import REPLICATED, MeshAxes, reduce_max, reduce_sum
from jax_te.typing import Array, LogicalAxes


class _Args(NamedTuple):
    qkv: Any
    state: AttentionState | None


class _Residuals(NamedTuple):
    """Residuals of FP8 attention.

    Args:
        qkv: quantized operands, keys and values centred, this device's after an exchange for heads.
        out, log_sum: results of forward before an exchange back; the output is that of centred values.
        scales, amaxes: scales and amaxes of the tensors that forward has quantized.
        state: state of the call.
    """

    qkv: Fp8Operands
    out: Array | QuantizedTensor
    log_sum: Array
    scales: Scales
    amaxes: Amaxes
    state: AttentionState | None


def fp8_attention(call: Fp8Call, qkv: QKV, state: AttentionState | None, out_axes: LogicalAxes | None) -> Array:
    """Return attention ``[b, sq, n, dv]`` in the dtype of ``qkv``, of operands that are quantized inside.

    Args:
        call: the resolved call.
        qkv: see `jax_te.ops.dot_product_attention`.
        state: the recipe's state, whose gradient is its next value.
        out_axes: logical axes of the output.
    """
    args = _Args(qkv, state if call.precision.roles else None)
    return _attention(call, _shards(call, args), args, None, out_axes)


def _forward(call: Fp8Call, args: _Args) -> tuple[Array, _Residuals]:
    precision, state = call.precision, args.state
    q, k, v = map(show_overflow, unpack(args.qkv))
    k, v, mean_of_v, of_centred = _centred(call, k, v)
    of_queries: Amaxes = {"q": amax(q)}
    seen = _reduced(of_queries | of_centred, call.scale_axes)
    scales = _first_scales(call, state, seen)
    operands = Fp8Operands(
        fp8_steps.to_heads(call, precision.quantize(q, scales["q"])),
        fp8_steps.to_heads(call, precision.quantize(k, scales["k"])),
        fp8_steps.to_heads(call, precision.quantize(v, scales["v"])),
    )
    operands, mean_of_v = named((operands, mean_of_v), "quantized", given=args)
    if call.current_scales and precision.delayed and precision.quantized_forward:
        scales = _scales_after_a_pass(call, operands, scales)
    out, log_sum, inside = named(
        fp8_steps.forward(call, operands, _inside_forward(call, scales)), "context", given=args
    )
    whole = fp8_steps.in_compute_dtype(fp8_steps.to_sequence(call, out))
    return _with_mean(whole, mean_of_v), _Residuals(operands, out, log_sum, scales, seen | inside, state)


def _first_scales(call: Fp8Call, state: AttentionState | None, seen: Amaxes) -> Scales:
    """Return the scales that are known before a kernel runs; ``seen`` are the amaxes of queries, keys and values."""
    precision = call.precision
    scales = _bound_of_softmax(call) | precision.state_scales(state)
    if not precision.delayed:
        scales |= {name: precision.scale_of_amax(largest) for name, largest in seen.items()}
    elif call.current_scales:
        scales = scales | _scales_of(call, seen)
        scales.pop("o", None)  # until its amax is known
    return _with_output_scale(call, scales)


def _scales_after_a_pass(call: Fp8Call, operands: Fp8Operands, scales: Scales) -> Scales:
    """Return the scales with those of the tensors that forward's kernel writes, from their amaxes in a first pass."""
    first = fp8_steps.forward(call, operands, _inside_forward(call, scales))
    return _with_output_scale(call, scales | _scales_of(call, _reduced(first.amaxes, call.scale_axes)))


def _inside_forward(call: Fp8Call, scales: Scales) -> Scales:
    """Return the scales of forward's kernel."""
    # Forward rounds before it divides by denominators: the largest value of each row is 1, however small the amax of
    # the quotients is. A delayed scale of these would saturate the values above that amax; it is for backward alone.
    return scales | _bound_of_softmax(call)


def _bound_of_softmax(call: Fp8Call) -> Scales:
    """Return the scale of the softmax, which gives at most 1."""
    return {"s": call.precision.scale_of_amax(jnp.ones((), jnp.float32))}


def _backward(call: Fp8Call, residuals: _Residuals, g: Array) -> tuple[_Args, None]:
    precision, scales = call.precision, residuals.scales
    operands, log_sum = residuals.qkv, residuals.log_sum
    if call.sends_keys:
        # Without the barrier the compiler finds that forward moved the same keys, and keeps those of all devices.
        operands, log_sum, g = jax.lax.optimization_barrier((operands, log_sum, g))
    seen: Amaxes = {}
    do: Any = g
    if precision.quantized_backward:
        g = show_overflow(g)
        seen = _reduced({"do": amax(g)}, call.scale_axes)
        if not precision.delayed:
            of_gradient: Scales = {"do": precision.scale_of_amax(seen["do"])}
            scales = scales | of_gradient
        elif call.current_scales:
            scales = scales | _scales_of(call, seen)
        do = precision.quantize(g, scales["do"])
    do, out = fp8_steps.to_heads(call, do), residuals.out
    if not isinstance(out, QuantizedTensor):
        assert isinstance(do, QuantizedTensor), "a recipe quantizes one pass at least"
        out = codes_with_mean(out, do, precision)
    if call.current_scales and precision.quantized_backward:
        # The gradient of the scores first, from whose quantized form the other gradients are computed.
        for last in ({"dp"}, {"dq", "dk", "dv"}):
            _, inside = fp8_steps.backward(call, operands, out, log_sum, do, scales)
            amaxes = _reduced({name: largest for name, largest in inside.items() if name in last}, call.scale_axes)
            scales = scales | _scales_of(call, amaxes)
    gradients, inside = fp8_steps.backward(call, operands, out, log_sum, do, scales)
    seen |= inside
    d_qkv: Any = (jnp.stack(gradients, axis=2),) if call.spec.packed else gradients
    return _Args(d_qkv, _next_state(call, residuals, seen)), None


def _scales_of(call: Fp8Call, amaxes: Amaxes) -> Scales:
    """Return the scales of tensors with these amaxes; tensors whose scale is one entry of the state have one."""
    scales: Scales = {}
    for tensors in call.precision.roles.values():
        if known := [amaxes[name] for name in tensors if name in amaxes]:
            scales |= dict.fromkeys(tensors, call.precision.scale_of_amax(amax(jnp.stack(known))))
    return scales


def _with_output_scale(call: Fp8Call, scales: Scales) -> Scales:
    """Return the scales with the one of the output in place of the state's, if forward is quantized.

    It is that of the values times the power of two that is next below the state's scale.

    Where a query attends to one key alone, the output is that key's value, and so is its rounded form if both have one
    grid. With another scale it would be rounded anew, in the same way each time that key is attended to: a part of the
    gradient of each such score that has no cause, and that training follows.
    """
    dtype = call.precision.dtype
    if not call.precision.quantized_forward:
        return scales
    output: Scales = {"o": scales["v"]}  # the output is a mean of values
    if "o" in scales:
        largest_code = float(jnp.finfo(dtype).max) * scales["v"] / scales["o"]
        output = {"o": scales["v"] * exponent_scale(largest_code, dtype)}
    return scales | output


def _next_state(call: Fp8Call, residuals: _Residuals, seen: Amaxes) -> AttentionState | None:
    """Return the state's next value; ``seen`` are amaxes of backward."""
    precision, state = call.precision, residuals.state
    if state is None or call.frozen_scales:
        return state
    tensors: list[AttentionTensor] = [name for tensors in precision.roles.values() for name in tensors]
    amaxes = residuals.amaxes | seen
    # The state belongs to the whole arrays, wherever a scale may be of their shards.
    whole = _reduced({name: amaxes[name] for name in tensors}, call.all_axes)
    return precision.next_state(state, precision.state_scales(state), whole)


def _centred(call: Fp8Call, k: Array, v: Array) -> tuple[Array, Array, Array, Amaxes]:
    """Return keys and values less about their means over the sequence, and their amaxes.

    The third result is the mean of the values, fp32 ``[b, 1, g, dv]``.
    """

    def over_positions(reduction: Any) -> Array:
        """Return a reduction of keys and of values, side by side, fp32 ``[b, 1, g, d + dv]``."""
        return jnp.concatenate([reduction(x.astype(jnp.float32), axis=1, keepdims=True) for x in (k, v)], axis=-1)

    # One mean for all devices along the context axis, whose keys meet in the softmax of each query.
    context = () if call.sharding is None else call.sharding.context
    sums = reduce_sum(over_positions(jnp.sum), context)
    means = sums / call.spec.kv_length
    high, low = over_positions(jnp.max), over_positions(jnp.min)
    # A maximum of floats may lose a nan, see `jax_te.quantize.amax`; a sum keeps it.
    high = jnp.where(jnp.isnan(sums), sums, high)
    # Any constant near the mean serves: a multiple of about a sixteenth of the largest value, which another order of
    # the sum, as on a mesh, changes next to never.
    largest = reduce_max(jnp.maximum(jnp.abs(high), jnp.abs(low)), context)
    grid = jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0) / 16
    means = jnp.round(means / grid) * grid
    # Of a feature that is 0, or has a value that is not finite: that would be in all positions.
    means = jnp.where(jnp.isfinite(means), means, 0.0)
    mean_of_k, mean_of_v = jnp.split(means, [k.shape[-1]], axis=-1)

    def less(x: Array, mean: Array) -> Array:
        # In fp16 the difference may overflow where the value did not.
        return show_overflow((x.astype(jnp.float32) - mean).astype(k.dtype))  # that of the values, too

    # The amaxes follow from the extremes, since rounding keeps the order: no second pass over all positions.
    extremes = jnp.split(less(jnp.concatenate([high, low], axis=1), means), [k.shape[-1]], axis=-1)
    return less(k, mean_of_k), less(v, mean_of_v), mean_of_v, {"k": amax(extremes[0]), "v": amax(extremes[1])}


def _with_mean(out: Array, mean: Array) -> Array:
    """Return the output ``[b, s, n, dv]`` of centred values with their mean, each group's for all of its heads."""
    heads = jnp.repeat(mean, out.shape[2] // mean.shape[2], axis=2)
    return (out.astype(jnp.float32) + heads).astype(out.dtype)


def _reduced(amaxes: Amaxes, axes: MeshAxes) -> Amaxes:
    """Return amaxes over the devices of mesh axes, by one exchange."""
    if not axes:
        return amaxes
    return dict(zip(amaxes, reduce_max(jnp.stack(list(amaxes.values())), axes), strict=True))


def _check_differentiated(call: Fp8Call, args: _Args, perturbed: _Args, sinks: Any) -> None:
    """Raise QuantizerStateError for a derivative that leaves the state out, which would then never change, or adds its
    gradients."""
    check_gradients_merge(args.state, perturbed.state)
    if call.evaluation or call.frozen_scales or all(jax.tree.leaves(perturbed.state)):
        return
    raise QuantizerStateError(_LEFT_OUT.format(call.precision.recipe_name))


_LEFT_OUT = (
    "a derivative of attention under recipe {!r} with fp8_dpa=True leaves the quantizer state out, whose gradient is "
    "its next value: the scales would never change. jax_te.value_and_grad (for Linen jax_te.linen.value_and_grad) and "
    "make_train_step write it back; a function of your own differentiates `state`, too, as "
    "jax_te.quantize.with_max_gradients gives it. For inference call model.eval(); if the scales are to stay, say so: "
    "`with jax_te.quantize.frozen_scales():`"
)

_attention = sharded_vjp(
    _forward,
    _backward,
    name="context",
    check=_check_differentiated,
    once=lambda call: why_quantized(call.precision.recipe_name),
)


def _shards(call: Fp8Call, args: _Args) -> Shards | None:
    sharding = call.sharding
    if sharding is None:
        return None
    b, s, n = (axes or None for axes in (sharding.batch, sharding.context, sharding.heads))
    heads = PartitionSpec(b, s, n, None)
    specs = _Args((PartitionSpec(b, s, None, n, None),) if len(args.qkv) == 1 else (heads,) * 3, REPLICATED)  # type: ignore[arg-type]
    return Shards(mesh=sharding.mesh, args=specs, out=heads, cotangents=specs, axis_names=sharding.axis_names)
