"""FP8 attention as an op: scales, quantized residuals, and the next state of the scales.

The steps between the quantized operands and the quantized results are those of plain JAX (`jax_te.ops.xla`) or of
cuDNN's kernels. On a mesh each device runs its own examples and heads; where the sequence is split, every device
all-gathers the FP8 codes of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_te.errors import QuantizerStateError
from jax_te.ops.attention.context_parallel import all_gather
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.backend import fp8_kernels, primitives
from jax_te.ops.first_order import why_quantized
from jax_te.ops.overflow import show_overflow
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.ops.stacked import named
from jax_te.ops.xla.attention_fp8 import Amaxes, Fp8Operands, Scales
from jax_te.quantize import AttentionPrecision, AttentionState, AttentionTensor, QuantizedTensor, amax
from jax_te.sharding import REPLICATED, MeshAxes, reduce_max
from jax_te.sharding import all_gather as all_gather_shards
from jax_te.typing import Array, LogicalAxes


@dataclass(frozen=True, kw_only=True)
class Fp8Call:
    """A call of FP8 attention, resolved. Hashable: its rules are traced once for each.

    Args:
        spec: the whole call.
        precision: the recipe.
        kernels: who runs the steps between quantized tensors.
        sharding: sharding of the call on a mesh whose devices run it by themselves; None: one device, or the compiler
            partitions it.
        high_precision_backend: backend of a backward pass that is not quantized.
        evaluation: whether the layer evaluates, so that state need not be differentiated.
        frozen_scales: whether the state stays as it is.
    """

    spec: AttentionSpec
    precision: AttentionPrecision
    kernels: Literal["xla", "cudnn"]
    sharding: AttentionSharding | None = None
    high_precision_backend: str = "xla"
    evaluation: bool = False
    frozen_scales: bool = False

    @property
    def all_axes(self) -> MeshAxes:
        """Mesh axes over which the arrays are split."""
        sharding = self.sharding
        return () if sharding is None else sharding.batch + sharding.context + sharding.heads

    @property
    def scale_axes(self) -> MeshAxes:
        """Mesh axes over which the amax that gives an operand's scale is reduced."""
        if self.sharding is None or self.precision.delayed:
            return ()  # a delayed scale is the state's, which all devices have
        if self.precision.amax_scope == "whole":
            return self.all_axes
        # A scale of each device's examples and heads; those that all-gather keys have one for all of these.
        return self.sharding.context

    def block(self) -> tuple[AttentionSpec, AttentionArrays]:
        """Return spec and positions of the attention that a device computes, its queries to all keys."""
        if self.sharding is None:
            return self.spec, AttentionArrays()
        if self.sharding.context:
            return all_gather.with_positions(self.sharding, AttentionArrays())
        return self.sharding.shard_spec(self.spec.q_length, self.spec.kv_length), AttentionArrays()


class _Args(NamedTuple):
    qkv: Any
    state: AttentionState | None


class _Residuals(NamedTuple):
    """Residuals of FP8 attention.

    Args:
        qkv: quantized operands, this device's; or the arguments themselves for a backward pass in high precision.
        out, log_sum: results of forward; the output quantized if backward is.
        scales, amaxes: of the tensors that forward has quantized.
        state: state of the call.
    """

    qkv: Any
    out: Any
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
    precision, state, arguments = call.precision, args.state, args.qkv
    q, k, v = map(show_overflow, unpack(arguments))
    seen: Amaxes = _reduced({"q": amax(q), "k": amax(k), "v": amax(v)}, call.scale_axes)
    scales = precision.state_scales(state)
    if not precision.delayed:
        scales |= {name: precision.scale_of_amax(largest) for name, largest in seen.items()}
        # The softmax gives at most 1, and the output is a mean of rows of v.
        scales |= {
            "s": precision.scale_of_amax(jnp.ones((), jnp.float32)),
            "o": precision.scale_of_amax(seen["v"]),
        }
    operands = Fp8Operands(
        precision.quantize(q, scales["q"]),
        precision.quantize(k, scales["k"]),
        precision.quantize(v, scales["v"]),
    )
    operands = named(operands, "quantized", given=args)
    spec, arrays = call.block()
    kernels = fp8_kernels(call.kernels)
    out8, log_sum, inside = kernels.fp8_attention_forward(
        _with_all_keys(call, operands), spec, arrays, precision, scales
    )
    out8, log_sum, inside = named((out8, log_sum, inside), "context", given=args)
    out = out8.dequantize()
    amaxes = seen | inside
    if precision.quantized_backward:
        return out, _Residuals(operands, out8, log_sum, scales, amaxes, state)
    out = checkpoint_name(out, "context")
    return out, _Residuals(arguments, out, log_sum, scales, amaxes, state)


def _backward(call: Fp8Call, residuals: _Residuals, g: Array) -> tuple[_Args, None]:
    if not call.precision.quantized_backward:
        return _Args(_high_precision_backward(call, residuals, g), _next_state(call, residuals, {})), None
    precision, scales, g = call.precision, residuals.scales, show_overflow(g)
    seen: Amaxes = _reduced({"do": amax(g)}, call.scale_axes)
    if not precision.delayed:
        scales = scales | {"do": precision.scale_of_amax(seen["do"])}
    operands, log_sum = residuals.qkv, residuals.log_sum
    if call.sharding is not None and call.sharding.context:
        # Without the barrier the compiler finds that forward gathered the same keys, and keeps those of all devices.
        operands, log_sum, g = jax.lax.optimization_barrier((operands, log_sum, g))
    spec, arrays = call.block()
    gradients = fp8_kernels(call.kernels).fp8_attention_backward(
        _with_all_keys(call, operands),
        residuals.out,
        log_sum,
        precision.quantize(g, scales["do"]),
        spec,
        arrays,
        precision,
        scales,
    )
    dq, dk, dv = gradients.dq.dequantize(), _of_own_keys(call, gradients.dk), _of_own_keys(call, gradients.dv)
    state = _next_state(call, residuals, seen | gradients.amaxes)
    return _Args((jnp.stack((dq, dk, dv), axis=2),) if call.spec.packed else (dq, dk, dv), state), None


def _high_precision_backward(call: Fp8Call, residuals: _Residuals, g: Array) -> QKV:
    """Return the gradients of the exact operands at forward's output, in the compute dtype."""
    qkv, out, log_sum = residuals.qkv, residuals.out, residuals.log_sum
    if call.sharding is not None and call.sharding.context:
        sharding = replace(call.sharding, backend=call.high_precision_backend)
        gradients: Any = all_gather.backward(sharding, qkv, AttentionArrays(), out, log_sum, g).qkv
    else:
        spec, arrays = call.block()
        gradients, *_ = primitives(call.high_precision_backend).attention_backward(qkv, spec, arrays, out, log_sum, g)
    return (jnp.stack(gradients, axis=2),) if call.spec.packed and len(gradients) == 3 else gradients


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


def _reduced(amaxes: Amaxes, axes: MeshAxes) -> Amaxes:
    """Return amaxes over the devices of mesh axes, by one exchange."""
    if not axes:
        return amaxes
    return dict(zip(amaxes, reduce_max(jnp.stack(list(amaxes.values())), axes), strict=True))


def _with_all_keys(call: Fp8Call, operands: Fp8Operands) -> Fp8Operands:
    """Return a device's queries and the keys and values of all positions."""
    if call.sharding is None or not call.sharding.context:
        return operands
    along_sequence = ((), call.sharding.context)

    def gathered(x: QuantizedTensor) -> QuantizedTensor:
        return replace(x, data=all_gather_shards(x.data, along_sequence))

    return Fp8Operands(operands.q, gathered(operands.k), gathered(operands.v))


def _of_own_keys(call: Fp8Call, gradient: QuantizedTensor) -> Array:
    """Return the gradient of a device's keys or values, of which each device has a summand for those of all."""
    if call.sharding is None or not call.sharding.context:
        return gradient.dequantize()
    # Summands are FP8, as kernels write them; their sum is rounded to the compute dtype once.
    own = jax.lax.psum_scatter(gradient.values(), call.sharding.context, scatter_dimension=1, tiled=True)
    return own.astype(gradient.dtype)


def _check_differentiated(call: Fp8Call, args: _Args, perturbed: _Args, sinks: Any) -> None:
    """Raise QuantizerStateError for a derivative that leaves the state out, which would then never change."""
    if call.evaluation or call.frozen_scales or all(jax.tree.leaves(perturbed.state)):
        return
    raise QuantizerStateError(_LEFT_OUT.format(call.precision.recipe_name))


_LEFT_OUT = (
    "a derivative of attention under recipe {!r} with fp8_dpa=True leaves the quantizer state out, whose gradient is "
    "its next value: the scales would never change. jax_te.value_and_grad (for Linen jax_te.linen.value_and_grad) and "
    "make_train_step write it back; a function of your own differentiates `state`, too, by "
    "jax_te.quantize.with_max_gradients if it is used several times. For inference call model.eval(); if the scales "
    "are to stay, say so: `with jax_te.quantize.frozen_scales():`"
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
