"""One device's attention of a block of queries to a block of keys, and merging of such blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.fp8_types import Amaxes
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec
from jax_te.ops.backend import primitives
from jax_te.typing import Array


class BlockOutput(NamedTuple):
    """Results of one block.

    Args:
        out: output ``[b, sq, n, dv]``.
        log_sum: logarithm of the softmax's denominator, fp32 ``[b, n, sq]``.
        max_logit: fp32 ``[n]``, or None.
        amaxes: largest absolute values of what a quantized block has quantized, fp32 ``[]`` by name; None: nothing.
    """

    out: Array
    log_sum: Array
    max_logit: Array | None
    amaxes: Amaxes | None = None


class BlockGradients(NamedTuple):
    """Gradients of queries, keys and values, of the bias, and of the softmax's offset; amaxes as in `BlockOutput`."""

    qkv: QKV
    bias: Array | None
    offset: Array | None
    amaxes: Amaxes | None = None


class BlockRules(NamedTuple):
    """Forward and backward of a block, as functions of the arguments of `forward` and `backward` but the first."""

    forward: Callable[..., BlockOutput]
    backward: Callable[..., BlockGradients]


def rules_of(sharding: AttentionSharding) -> BlockRules:
    """Return the rules of blocks that the sharding's backend computes."""
    return BlockRules(functools.partial(forward, sharding), functools.partial(backward, sharding))


def forward(sharding: AttentionSharding, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> BlockOutput:
    """Return the output of one block."""
    return BlockOutput(*primitives(sharding.backend).attention_forward(qkv, spec, arrays))


def backward(
    sharding: AttentionSharding, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, *rest: Array
) -> BlockGradients:
    """Return the gradients of one block; ``rest`` is ``out`` and ``log_sum`` of all blocks merged, and ``g``."""
    return BlockGradients(*primitives(sharding.backend).attention_backward(qkv, spec, arrays, *rest))


def merge(blocks: list[BlockOutput]) -> BlockOutput:
    """Return attention to the keys of all blocks, in fp32."""
    log_sum = blocks[0].log_sum
    for block in blocks[1:]:
        log_sum = jnp.logaddexp(log_sum, block.log_sum)
    out = _weighted(blocks[0], log_sum)
    for block in blocks[1:]:
        out = out + _weighted(block, log_sum)
    return BlockOutput(out, log_sum, max_logits(blocks), largest([block.amaxes for block in blocks]))


def largest(amaxes: list[Amaxes | None]) -> Amaxes | None:
    """Return the amaxes of all blocks, or None."""
    return jax.tree.map(lambda *each: functools.reduce(jnp.maximum, each), *amaxes)


def max_logits(blocks: list[BlockOutput]) -> Array | None:
    """Return the max logits of all blocks, or None."""
    logits = [block.max_logit for block in blocks if block.max_logit is not None]
    return functools.reduce(jnp.maximum, logits) if logits else None


def sum_float32(blocks: list[Array]) -> Array:
    """Return the sum, in fp32."""
    total = blocks[0].astype(jnp.float32)
    for block in blocks[1:]:
        total = total + block.astype(jnp.float32)
    return total


def _weighted(block: BlockOutput, log_sum: Array) -> Array:
    return block.out.astype(jnp.float32) * per_query(softmax_weight(block.log_sum, log_sum))


def softmax_weight(block: Array, total: Array) -> Array:
    """Return ``exp(block - total)`` of logarithms: the block's weight in the whole softmax."""
    # A query that attends to nothing has -inf in both, and -inf - -inf is nan.
    return jnp.where(block == -jnp.inf, 0.0, jnp.exp(block - total))


def per_query(x: Array) -> Array:
    """Return ``[b, n, s]`` as ``[b, s, n, 1]``."""
    return x.swapaxes(1, 2)[..., None]


def pad_to(x: Array, taken: slice, axis: int, size: int, fill: float = 0.0) -> Array:
    """Return ``x`` as the entries ``taken`` of an axis of ``size``, with ``fill`` in the others."""
    if x.shape[axis] == size:
        return x
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (taken.start, size - taken.stop, 0)
    # Not .at[...].set: its empty array of indices is an input that nothing reads, and inside of shard_map such inputs
    # crash Shardy when it compiles for GPUs (jax 0.11.2).
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), edges)


def with_positions(
    sharding: AttentionSharding, arrays: AttentionArrays, q_positions: Array, kv_positions: Array
) -> tuple[AttentionSpec, AttentionArrays]:
    """Return spec and arrays of a block for plain JAX, whose queries and keys have these positions, in any order."""
    arrays = arrays._replace(q_positions=q_positions, kv_positions=kv_positions)
    mask_type = sharding.spec.mask_type
    if mask_type == "causal_bottom_right":
        # The diagonal ends at the last query and key of the whole call, which a block knows only from lengths.
        mask_type = "padding_causal_bottom_right"
        b = sharding.spec.batch // sharding.batch_shards
        arrays = arrays._replace(
            q_lengths=jnp.full((b,), sharding.spec.q_length, jnp.int32),
            kv_lengths=jnp.full((b,), sharding.spec.kv_length, jnp.int32),
        )
    return sharding.shard_spec(q_positions.shape[0], kv_positions.shape[0], mask_type), arrays
