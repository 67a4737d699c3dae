"""Ring attention: keys and values travel around a ring of devices, and each adds its queries' attention to the local
keys.

Under a causal mask in natural order, a device's queries attend to all keys of an earlier shard and to none of a later
one. In zig-zag order they attend to one half of the scores of any other shard: all queries to the early keys of an
earlier shard, the late queries to all keys of a later one.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Transformer Engine's ring attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_te.ops.attention.context_parallel import block
from jax_te.ops.attention.context_parallel.block import BlockGradients, BlockOutput, BlockRules
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding, shard_positions
from jax_te.ops.attention.fp8_types import Amaxes
from jax_te.ops.attention.softmax_offset import offset_gradient, offset_of
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec, MaskType, unpack
from jax_te.sharding import moved
from jax_te.typing import Array

T = TypeVar("T")


class RingStep(NamedTuple):
    """Scores that a device computes at a step: rows (queries), columns (keys) and mask."""

    rows: slice
    columns: slice
    mask_type: MaskType


class RingGradients(NamedTuple):
    """Gradients of one step: of all of a device's queries, of the local keys and values, and of the bias; amaxes."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    amaxes: Amaxes | None


# Each addition reads and writes a sum in fp32, each pending block takes memory: four share one addition.
MERGED_BLOCKS = 4


def forward(
    sharding: AttentionSharding, qkv: QKV, arrays: AttentionArrays, rules: BlockRules | None = None
) -> BlockOutput:
    """Return attention of a device's queries to all keys.

    Args:
        sharding, arrays: the call, and this device's arrays.
        qkv: operands of ``rules``: queries, keys and values, or their FP8 codes.
        rules: None: those of the sharding's backend.
    """
    rules = rules or block.rules_of(sharding)
    q, k, v = unpack(qkv)
    blocks: list[BlockOutput] = []
    for step in range(sharding.ring_size):
        # Each send waits for the step before. XLA runs one exchange at a time beside computation, and would otherwise
        # make all sends first, which overlap with nothing and hold the keys of all devices at once.
        (k, v), blocks = jax.lax.optimization_barrier(((k, v), blocks))
        # Sent before it is used, so that it is under way while this step is computed.
        received = _send(sharding, k, v) if step + 1 < sharding.ring_size else (k, v)

        def attend(part: RingStep, k: Array = k, v: Array = v, step: int = step) -> BlockOutput:
            rows, columns, size = part.rows, part.columns, q.shape[1]
            spec, local = _block(sharding, arrays, step, part, (size, k.shape[1]))
            result = rules.forward((q[:, rows], k[:, columns], v[:, columns]), spec, local)
            log_sum = block.pad_to(result.log_sum, rows, 2, size, fill=-jnp.inf)
            return result._replace(out=block.pad_to(result.out, rows, 1, size), log_sum=log_sum)

        blocks.append(_at_step(sharding, step, attend, _no_keys, (q.shape[1], k.shape[1])))
        if len(blocks) == MERGED_BLOCKS or step + 1 == sharding.ring_size:
            blocks = [block.merge(blocks)]
        k, v = received
    out, log_sum = blocks[0].out, blocks[0].log_sum
    # Blocks are plain softmaxes, and the offset is added once, at the end; otherwise it would count once per step.
    offset = offset_of(sharding.shard_spec(q.shape[1], k.shape[1]), arrays)
    if offset is not None:
        total = jnp.logaddexp(log_sum, jnp.broadcast_to(offset, log_sum.shape))
        out, log_sum = out * block.per_query(block.softmax_weight(log_sum, total)), total
    return blocks[0]._replace(out=out.astype(sharding.spec.dtype), log_sum=log_sum)


def backward(
    sharding: AttentionSharding,
    qkv: QKV,
    arrays: AttentionArrays,
    out: Array,
    log_sum: Array,
    g: Array,
    rules: BlockRules | None = None,
) -> BlockGradients:
    """Return the gradients of a device's queries, keys and values.

    The gradients of keys and values follow them around the ring, one step behind.

    Args:
        sharding, qkv, arrays, rules: see `forward`.
        out, log_sum: results of forward, ``out`` and ``g`` as ``rules`` take them.
        g: gradient of the output.
    """
    rules = rules or block.rules_of(sharding)
    q, k, v = unpack(qkv)
    amaxes: list[Amaxes | None] = []
    dq: list[Array] = []
    d_bias: list[Array] = []
    behind: tuple[Array, ...] = ()  # the sums so far for the keys and values of the step before
    last = sharding.ring_size - 1
    for step in range(sharding.ring_size):
        # As in forward: keeps each send beside the attention of its own step.
        (k, v), behind, dq = jax.lax.optimization_barrier(((k, v), behind, dq))
        received = _send(sharding, *((k, v) if step < last else ()), *behind)
        ahead, behind = (received[:2], received[2:]) if step < last else ((k, v), received)

        def attend(part: RingStep, k: Array = k, v: Array = v, step: int = step) -> RingGradients:
            rows, columns, sizes = part.rows, part.columns, (q.shape[1], k.shape[1])
            spec, local = _block(sharding, arrays, step, part, sizes)
            operands = (q[:, rows], k[:, columns], v[:, columns])
            gradients = rules.backward(operands, spec, local, out[:, rows], log_sum[:, :, rows], g[:, rows])
            dq, dk, dv = unpack(gradients.qkv)
            dk, dv = block.pad_to(dk, columns, 1, sizes[1]), block.pad_to(dv, columns, 1, sizes[1])
            return RingGradients(block.pad_to(dq, rows, 1, sizes[0]), dk, dv, gradients.bias, gradients.amaxes)

        gradients = _at_step(sharding, step, attend, _zeros, (q.shape[1], k.shape[1]))
        amaxes.append(gradients.amaxes)
        dq, d_bias = [*dq, gradients.q], [*d_bias, *(() if gradients.bias is None else (gradients.bias,))]
        if len(dq) == MERGED_BLOCKS or step == last:
            dq, d_bias = [block.sum_float32(dq)], [block.sum_float32(d_bias)] if d_bias else []
        behind = (gradients.k + behind[0], gradients.v + behind[1]) if behind else (gradients.k, gradients.v)
        k, v = ahead
    # A last send: the current keys are the next device's own.
    dk, dv = _send(sharding, *behind)
    offset = arrays.softmax_offset
    d_offset = None if offset is None else offset_gradient(offset, log_sum, out, g).astype(offset.dtype)
    bias_gradient = None if not d_bias or arrays.bias is None else d_bias[0].astype(arrays.bias.dtype)
    d_qkv = dq[0].astype(sharding.spec.dtype), dk, dv
    return BlockGradients(d_qkv, bias_gradient, d_offset, block.largest(amaxes))


def is_structured(sharding: AttentionSharding) -> bool:
    """Return whether a device attends to all, half or none of the keys of any other, without comparing positions."""
    spec = sharding.spec
    no_window = spec.window[0] < 0 and (spec.is_causal or spec.window[1] < 0)
    square = spec.q_length == spec.kv_length
    return no_window and (spec.mask_type == "no_mask" or (spec.mask_type == "causal" and square))


def block_specs(sharding: AttentionSharding) -> list[AttentionSpec]:
    """Return the descriptions of all calls of cuDNN."""
    sizes = sharding.spec.q_length // sharding.ring_size, sharding.spec.kv_length // sharding.ring_size
    parts = [part for step in range(sharding.ring_size) for part in _parts_of_step(sharding, step, sizes)]
    return list(dict.fromkeys(_spec(sharding, part, sizes) for part in parts if part is not None))


def _no_keys(like: BlockOutput) -> BlockOutput:
    """Return attention to no keys."""
    out, log_sum, max_logit, amaxes = like
    low = None if max_logit is None else jnp.full(max_logit.shape, -jnp.inf, max_logit.dtype)
    out, amaxes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (out, amaxes))
    return BlockOutput(out, jnp.full(log_sum.shape, -jnp.inf, log_sum.dtype), low, amaxes)


def _zeros(like: RingGradients) -> RingGradients:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _parts_of_step(
    sharding: AttentionSharding, step: int, sizes: tuple[int, int]
) -> tuple[RingStep | None, RingStep | None]:
    """Return the parts that a device computes with the keys from ``step`` devices before it: for an earlier shard, and
    for a later one after the ring has wrapped around.
    """
    queries, keys = slice(0, sizes[0]), slice(0, sizes[1])
    if step == 0 or not is_structured(sharding) or sharding.spec.mask_type == "no_mask":
        part = RingStep(queries, keys, sharding.spec.mask_type)
        return part, part
    if not sharding.load_balanced:
        return RingStep(queries, keys, "no_mask"), None
    early_keys, late_queries = slice(0, sizes[1] // 2), slice(sizes[0] // 2, sizes[0])
    return RingStep(queries, early_keys, "no_mask"), RingStep(late_queries, keys, "no_mask")


def _at_step(
    sharding: AttentionSharding,
    step: int,
    attend: Callable[[RingStep], T],
    nothing: Callable[[T], T],
    sizes: tuple[int, int],
) -> T:
    """Return ``attend`` of the part that a device computes at a step, or ``nothing`` of a result's shape if there is
    none."""
    earlier, later = _parts_of_step(sharding, step, sizes)
    assert earlier is not None
    if earlier == later:
        return attend(earlier)
    # A branch, not a mask: half of the devices would otherwise compute scores that are discarded.
    return jax.lax.cond(
        step <= _index(sharding),
        lambda: attend(earlier),
        lambda: nothing(jax.eval_shape(lambda: attend(earlier))) if later is None else attend(later),
    )


def _block(
    sharding: AttentionSharding, arrays: AttentionArrays, step: int, part: RingStep, sizes: tuple[int, int]
) -> tuple[AttentionSpec, AttentionArrays]:
    """Return spec and arrays of a block, without the softmax's offset."""
    arrays, spec = arrays._replace(softmax_offset=None), _spec(sharding, part, sizes)
    if sharding.backend != "xla":
        return spec, arrays
    index = _index(sharding)
    queries = shard_positions(sharding, index, sharding.spec.q_length)[part.rows]
    keys = shard_positions(sharding, (index - step) % sharding.ring_size, sharding.spec.kv_length)[part.columns]
    by_position, local = block.with_positions(sharding, arrays, queries, keys)
    # A structured part has the mask type "causal" or "no_mask", which compares fewer positions or none.
    return spec if is_structured(sharding) else dataclasses.replace(by_position, softmax_type="vanilla"), local


def _spec(sharding: AttentionSharding, part: RingStep, sizes: tuple[int, int]) -> AttentionSpec:
    rows, columns = len(range(sizes[0])[part.rows]), len(range(sizes[1])[part.columns])
    return sharding.shard_spec(rows, columns, part.mask_type, softmax_type="vanilla")


def _index(sharding: AttentionSharding) -> Array:
    return jax.lax.axis_index(sharding.context) // sharding.ulysses_size


def _send(sharding: AttentionSharding, *arrays: Array) -> tuple[Array, ...]:
    """Send ``arrays`` to the next device, and return those of the previous one."""
    shards, stride = sharding.context_shards, sharding.ulysses_size
    to_next = [(device, (device + stride) % shards) for device in range(shards)]

    def send(x: Array) -> Array:
        return moved(x, lambda x: jax.lax.ppermute(x, sharding.context, to_next))

    # As few arrays as possible: XLA runs one exchange at a time beside computation, and a second would have nothing to
    # hide behind. FP8 keys and values are one, their gradients another.
    received: dict[int, Array] = {}
    for shape, dtype in dict.fromkeys((x.shape, x.dtype) for x in arrays):
        alike = [i for i, x in enumerate(arrays) if (x.shape, x.dtype) == (shape, dtype)]
        sent = [arrays[i] for i in alike]
        parts = [send(sent[0])] if len(sent) == 1 else send(jnp.stack(sent))
        received.update(zip(alike, parts, strict=True))
    return tuple(received[i] for i in range(len(arrays)))
