"""The order of a sequence's tokens while a model runs: natural, or zig-zag among context ranks."""

from __future__ import annotations

import functools

from jax_te.config import TransformerConfig
from jax_te.ops import reorder_to_zigzag, undo_zigzag
from jax_te.sharding import auto_region, constrain
from jax_te.sharding.internal import axis_ranks
from jax_te.typing import Array, LogicalAxes


def zigzag_ranks(config: TransformerConfig) -> int:
    """Context ranks among which a model's tokens are in zig-zag order on the mesh in use; 1: they are in natural order.

    >>> zigzag_ranks(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cp_load_balanced=True))
    1
    """
    return axis_ranks("sequence") if config.cp_load_balanced else 1


def model_order(config: TransformerConfig, x: Array) -> Array:
    """What belongs to tokens, in the order that the model's layers see them in.

    Args:
        config: of the model.
        x: ``[b, s]`` or ``[s]``: tokens, labels, weights, positions.

    Raises:
        ValueError: if zig-zag order is asked for and ``s`` is no multiple of twice the context ranks.

    >>> import jax.numpy as jnp
    >>> config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cp_load_balanced=True)
    >>> model_order(config, jnp.arange(3)).tolist()  # without a mesh
    [0, 1, 2]
    """
    ranks = zigzag_ranks(config)
    if ranks == 1:
        return x
    axes: LogicalAxes = ("batch", "sequence")[-x.ndim :]
    move = functools.partial(reorder_to_zigzag, ranks=ranks, axis=x.ndim - 1)
    return constrain(auto_region(move, axes)(x), axes)


def caller_order(config: TransformerConfig, x: Array, axes: LogicalAxes) -> Array:
    """`model_order` undone, for activations ``[b, s, h]`` with logical axes ``axes``: context ranks gather them."""
    ranks = zigzag_ranks(config)
    if ranks == 1:
        return x
    return constrain(auto_region(lambda x: undo_zigzag(x, ranks), axes)(x), axes)
