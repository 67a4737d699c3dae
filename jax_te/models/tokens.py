"""What language models have in common around their tokens."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.sharding import constrain
from jax_te.typing import Array


def check_tokens(tokens: Array, max_sequence_length: int) -> None:
    """Raise TypeError for tokens that are not integers, ValueError for those that are not ``[b, s]`` or too long."""
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
    """Raise ValueError for an array that has not the shape of the tokens."""
    for name, array in arrays.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens {tokens.shape}, got {array.shape}")


def masked_mean(losses: Array, loss_mask: Array | None) -> Array:
    """Mean of the losses of tokens ``[b, s]``, weighted by ``loss_mask``; 0 where there is no weight at all.

    >>> float(masked_mean(jnp.array([[1.0, 3.0]]), jnp.array([[0, 1]])))
    3.0
    """
    if loss_mask is None:
        return jnp.mean(losses)
    weights = constrain(loss_mask.astype(jnp.float32), ("batch", "sequence"))
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0.0, total, 1.0)
