"""Initial distributions of weights."""

from __future__ import annotations

import math

from jax_te.config import NormalInit
from jax_te.typing import Initializer

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
    return NormalInit(std)


def scaled_normal_init(std: float, num_layers: int) -> Initializer:
    """`normal_init` with ``std / sqrt(2 num_layers)``: for projections whose output is added to the residual stream.

    Source: ``megatron.core.utils.scaled_init_method_normal``; Radford et al. 2019 (GPT-2).

    >>> scaled_normal_init(0.02, 2)(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be >= 1, got {num_layers!r}")
    return normal_init(std / math.sqrt(2.0 * num_layers))
