"""Initial distributions of weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_te.typing import Array, DTypeLike, Initializer

TE_INIT_STD = 0.023
"""Standard deviation of Transformer Engine's default ``init_method``."""


def normal_init(std: float = TE_INIT_STD) -> Initializer:
    """``init(key, shape, dtype)`` that draws from N(0, std²).

    Raises:
        ValueError: if ``std`` is negative.

    Source: ``megatron.core.utils.init_method_normal``; TE's default is 0.023.

    >>> normal_init(0.0)(jax.random.key(0), (2,), jnp.float32).tolist()
    [0.0, 0.0]
    """
    if not std >= 0.0:
        raise ValueError(f"std must be >= 0, got {std!r}")

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        # Without the barrier a jitted caller's compiler merges std with the last factor inside normal, which changes
        # the last bit of half of the values against an unjitted call.
        return std * jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype))

    return init


def scaled_normal_init(std: float, num_layers: int) -> Initializer:
    """`normal_init` with ``std / sqrt(2 num_layers)``: for projections whose output is added to the residual stream.

    Source: ``megatron.core.utils.scaled_init_method_normal``; Radford et al. 2019 (GPT-2).

    >>> scaled_normal_init(0.02, 2)(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be >= 1, got {num_layers!r}")
    return normal_init(std / math.sqrt(2.0 * num_layers))
