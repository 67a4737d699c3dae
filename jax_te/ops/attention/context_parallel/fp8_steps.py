"""FP8 attention on each device: the kernels' steps between quantized tensors, and the FP8 codes that devices exchange.

Keys and values travel as codes, a byte for each value; all devices along the context axis have one scale for them.

- An all-to-all moves codes of queries, keys, values, output and all gradients, and a device computes whole sequences.
- A ring moves codes of keys and values. Each of its blocks is a call of FP8 attention by itself, of one scale for each
  tensor: its softmax is that of the block's keys, at most 1, and its output a mean of values. Outputs are merged by
  their denominators in fp32, and quantized once more. Backward reads that output and the merged denominator.
- After an all-gather of codes plain JAX computes a device's queries to all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax

from jax_te.ops.attention.context_parallel import all_gather, ring, ulysses
from jax_te.ops.attention.context_parallel.block import BlockGradients, BlockOutput, BlockRules
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.fp8_types import Amaxes, Fp8Call, Fp8Operands, Fp8Output, Scales
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.backend import fp8_kernels, primitives
from jax_te.quantize import QuantizedTensor
from jax_te.sharding import all_gather as all_gather_shards
from jax_te.typing import Array

Tensor = TypeVar("Tensor", Array, QuantizedTensor)


def to_heads(call: Fp8Call, x: Tensor) -> Tensor:
    """Return an array or its codes of all positions of some heads; ``x`` where devices do not exchange heads."""
    return _exchanged(call, x, ulysses.to_heads)


def to_sequence(call: Fp8Call, x: Tensor) -> Tensor:
    """Return an array or its codes of this device's positions and all heads: the inverse of `to_heads`."""
    return _exchanged(call, x, ulysses.to_sequence)


def _exchanged(call: Fp8Call, x: Tensor, exchange: Callable[[AttentionSharding, Array], Array]) -> Tensor:
    if call.sharding is None or call.sharding.ulysses_size == 1:
        return x
    if isinstance(x, QuantizedTensor):
        return replace(x, data=exchange(call.sharding, x.data))
    return exchange(call.sharding, x)


def forward(call: Fp8Call, operands: Fp8Operands, scales: Scales) -> Fp8Output:
    """Return attention of a device's queries to all keys."""
    precision, sharding = call.precision, call.sharding
    if sharding is None or sharding.ring_size == 1:
        spec, arrays = _block(call)
        return _output(call, _with_all_keys(call, operands), scales, spec, arrays)
    out, log_sum, _, amaxes = ring.forward(
        sharding, _codes(operands), AttentionArrays(), _rules(call, operands, scales)
    )
    if amaxes is None:
        return Fp8Output(out, log_sum, {})
    quantized = precision.quantize(out, scales["o"])
    return Fp8Output(replace(quantized, dtype=call.spec.dtype), log_sum, amaxes)


def backward(
    call: Fp8Call,
    operands: Fp8Operands,
    out: QuantizedTensor,
    log_sum: Array,
    do: Array | QuantizedTensor,
    scales: Scales,
) -> tuple[tuple[Array, Array, Array], Amaxes]:
    """Return the gradients of a device's queries, keys and values in the compute dtype, and the amaxes.

    Args:
        call, operands: see `forward`.
        out, log_sum: its results.
        do: gradient of the output, as ``out`` is split; quantized if backward is.
        scales: those of `forward`, and those of a quantized backward.
    """
    sharding = call.sharding
    if sharding is not None and sharding.ring_size > 1:
        rules = _rules(call, operands, scales, out, do)
        codes = do.data if isinstance(do, QuantizedTensor) else do
        gradients = ring.backward(sharding, _codes(operands), AttentionArrays(), out.data, log_sum, codes, rules)
        dq, dk, dv = [to_sequence(call, x) for x in unpack(gradients.qkv)]
        return (dq, dk, dv), gradients.amaxes or {}
    spec, arrays = _block(call)
    (dq, dk, dv), amaxes = _gradients(call, _with_all_keys(call, operands), scales, out, log_sum, do, spec, arrays)
    if sharding is not None and sharding.gathers:
        return (in_compute_dtype(dq), _of_own_keys(sharding, dk), _of_own_keys(sharding, dv)), amaxes
    dq, dk, dv = [in_compute_dtype(to_sequence(call, x)) for x in (dq, dk, dv)]
    return (dq, dk, dv), amaxes


def _output(
    call: Fp8Call, operands: Fp8Operands, scales: Scales, spec: AttentionSpec, arrays: AttentionArrays
) -> Fp8Output:
    """Return the output of a block, quantized if forward is."""
    if call.precision.quantized_forward:
        return fp8_kernels(call.kernels).fp8_attention_forward(operands, spec, arrays, call.precision, scales)
    # Of the operands that backward reads, whose scores belong to this denominator.
    backend, spec = primitives(call.high_precision_backend), replace(spec, packed=False)
    out, log_sum, _ = backend.attention_forward(_dequantized(operands), spec, arrays)
    return Fp8Output(out, log_sum, {})


def _gradients(
    call: Fp8Call,
    operands: Fp8Operands,
    scales: Scales,
    out: QuantizedTensor,
    log_sum: Array,
    do: Array | QuantizedTensor,
    spec: AttentionSpec,
    arrays: AttentionArrays,
) -> tuple[tuple[Any, Any, Any], Amaxes]:
    """Return the gradients of a block, quantized if ``do`` is, and the amaxes of what has been quantized."""
    if isinstance(do, QuantizedTensor):
        dq, dk, dv, amaxes = fp8_kernels(call.kernels).fp8_attention_backward(
            operands, out, log_sum, do, spec, arrays, call.precision, scales
        )
        return (dq, dk, dv), amaxes
    # Of the operands that forward has read: scores of the exact ones do not belong to its denominators, and where
    # scores are large their exponentials would add up to a multiple of 1.
    backend, spec = primitives(call.high_precision_backend), replace(spec, packed=False)
    gradients, *_ = backend.attention_backward(_dequantized(operands), spec, arrays, out.dequantize(), log_sum, do)
    return unpack(gradients), {}


def _dequantized(operands: Fp8Operands) -> tuple[Array, Array, Array]:
    return operands.q.dequantize(), operands.k.dequantize(), operands.v.dequantize()


def in_compute_dtype(x: Array | QuantizedTensor) -> Array:
    """Return an array of the compute dtype, dequantized if ``x`` is quantized."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _block(call: Fp8Call) -> tuple[AttentionSpec, AttentionArrays]:
    """Return spec and positions of the attention that a device computes at once, its queries to all keys."""
    if call.sharding is None:
        return call.spec, AttentionArrays()
    if call.sharding.gathers:
        return all_gather.with_positions(call.sharding, AttentionArrays())
    return call.sharding.shard_spec(call.spec.q_length, call.spec.kv_length), AttentionArrays()


def _codes(operands: Fp8Operands) -> tuple[Array, Array, Array]:
    return operands.q.data, operands.k.data, operands.v.data


def _rules(call: Fp8Call, operands: Fp8Operands, scales: Scales, out: Any = None, do: Any = None) -> BlockRules:
    """Return the rules of a ring's blocks, which take codes and give arrays in the compute dtype.

    The codes of all devices have the scales of ``operands``, and in backward those of ``out`` and ``do``.
    """

    def quantized(qkv: QKV) -> Fp8Operands:
        return Fp8Operands(*(replace(x, data=data) for x, data in zip(operands, qkv, strict=True)))

    def block_forward(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> BlockOutput:
        out, log_sum, amaxes = _output(call, quantized(qkv), scales, spec, arrays)
        return BlockOutput(in_compute_dtype(out), log_sum, None, amaxes or None)

    def block_backward(
        qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out_codes: Array, log_sum: Array, do_codes: Array
    ) -> BlockGradients:
        given = replace(do, data=do_codes) if isinstance(do, QuantizedTensor) else do_codes
        (dq, dk, dv), amaxes = _gradients(
            call, quantized(qkv), scales, replace(out, data=out_codes), log_sum, given, spec, arrays
        )
        gradients = in_compute_dtype(dq), in_compute_dtype(dk), in_compute_dtype(dv)
        return BlockGradients(gradients, None, None, amaxes)

    return BlockRules(block_forward, block_backward)


def _with_all_keys(call: Fp8Call, operands: Fp8Operands) -> Fp8Operands:
    """Return a device's queries and the keys and values of all positions."""
    if call.sharding is None or not call.sharding.gathers:
        return operands
    along_sequence = ((), call.sharding.context)

    def gathered(x: QuantizedTensor) -> QuantizedTensor:
        return replace(x, data=all_gather_shards(x.data, along_sequence))

    return Fp8Operands(operands.q, gathered(operands.k), gathered(operands.v))


def _of_own_keys(sharding: AttentionSharding, gradient: Array | QuantizedTensor) -> Array:
    """Return the gradient of a device's keys or values, of which each device has a summand for those of all."""
    # Summands may be FP8, as kernels write them; their sum is rounded to the compute dtype once.
    summand = gradient.values() if isinstance(gradient, QuantizedTensor) else gradient
    own = jax.lax.psum_scatter(summand, sharding.context, scatter_dimension=1, tiled=True)
    return own.astype(gradient.dtype)
