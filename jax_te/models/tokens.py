"""Checks of tokens and arrays that belong to them, and their order while a model runs."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_te.config import TransformerConfig
from jax_te.layers import PackedSeqParams
from jax_te.ops import reorder_to_zigzag, undo_zigzag
from jax_te.sharding import auto_region, axis_ranks, constrain
from jax_te.typing import Array, LogicalAxes


def check_tokens(tokens: Array, max_sequence_length: int) -> None:
    """Raise TypeError for tokens that are not integers, ValueError for tokens that are not ``[b, s]`` or too long."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [b, s], got shape {tokens.shape}")
    if tokens.shape[1] > max_sequence_length:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens exceeds the model's max_sequence_length {max_sequence_length}; "
            "shorten it, or build the model for longer ones"
        )


def check_like_tokens(tokens: Array, **arrays: Array | None) -> None:
    """Raise ValueError for an array whose shape is not that of the tokens."""
    for name, array in arrays.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens {tokens.shape}, got {array.shape}")


def check_packed(tokens: Array, packed: PackedSeqParams) -> None:
    """Raise ValueError for boundaries that are not those of the tokens' rows; of traced ones only shapes are read."""
    b, s = tokens.shape
    packed.check(s)
    # cu_seqlens of one row need no axis of rows.
    shape = packed.cu_seqlens_q.shape
    rows = 1 if len(shape) == 1 else shape[0]
    if rows != b:
        raise ValueError(
            f"packed_seq_params have the boundaries of {rows} rows, cu_seqlens_q {list(shape)}, and tokens are "
            f"[{b}, {s}]; give cu_seqlens_q [{b}, m + 1]"
        )


def natural_positions(size: int, packed: PackedSeqParams | None) -> Array:
    """Return the positions of a row's tokens, int32 ``[size]``, or ``[b, size]`` of packed rows, in natural order.

    >>> natural_positions(3, None).tolist()
    [0, 1, 2]
    """
    if packed is None:
        return jnp.arange(size, dtype=jnp.int32)
    return constrain(packed.positions(size), ("batch", "sequence"))


def zigzag_shards(config: TransformerConfig) -> int:
    """Return the number of context shards over which a model's tokens are in zig-zag order; 1 is natural order.

    >>> zigzag_shards(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cp_load_balanced=True))
    1
    """
    return axis_ranks("sequence") if config.cp_load_balanced else 1


def model_order(config: TransformerConfig, x: Array) -> Array:
    """Return an array with one entry for each token, in the order in which the model's layers see the tokens.

    Args:
        config: configuration of the model.
        x: ``[b, s]`` or ``[s]``: tokens, labels, weights, positions.

    Raises:
        ValueError: for zig-zag order if ``s`` is not a multiple of twice the context shards.

    >>> import jax.numpy as jnp
    >>> config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cp_load_balanced=True)
    >>> model_order(config, jnp.arange(3)).tolist()  # without a mesh
    [0, 1, 2]
    """
    shards = zigzag_shards(config)
    if shards == 1:
        return x
    axes: LogicalAxes = ("batch", "sequence")[-x.ndim :]
    move = functools.partial(reorder_to_zigzag, ranks=shards, axis=x.ndim - 1)
    # auto_region, because explicit mesh axes cannot type a gather along a sharded axis; then constrain types it.
    return constrain(auto_region(move, axes)(x), axes)


def caller_order(config: TransformerConfig, x: Array, axes: LogicalAxes) -> Array:
    """Return activations ``[b, s, h]`` with logical axes ``axes`` in natural order: `model_order`'s inverse.

    Unlike `model_order`, which moves integers, this all-gathers hidden states over the context shards.
    """
    shards = zigzag_shards(config)
    if shards == 1:
        return x
    return constrain(auto_region(lambda x: undo_zigzag(x, shards), axes)(x), axes)
