"""Initial distributions of weights, for layers and configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_te._validation import checked
from jax_te.typing import DTypeLike

TE_INIT_STD = 0.023
"""Standard deviation of Transformer Engine's default ``init_method``."""


@checked
@dataclass(frozen=True)
class NormalInit:
    """``init(key, shape, dtype)`` that draws from N(0, std²).

    Two of the same ``std`` are equal and have one hash, as a field of a configuration needs: it is part of the jit
    cache key.

    Raises:
        ValueError: if ``std`` is negative.

    Source: ``megatron.core.utils.init_method_normal``.

    >>> NormalInit(0.0)(jax.random.key(0), (2,)).tolist(), NormalInit(0.02) == NormalInit(0.02)
    ([0.0, 0.0], True)
    """

    std: float

    def __post_init__(self) -> None:
        if not self.std >= 0.0:
            raise ValueError(f"std must be >= 0, got {self.std!r}")

    # Any stands for jax.Array: run-time type checkers evaluate annotations, and jax is imported only when called.
    def __call__(self, key: Any, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Any:
        import jax

        # Without the barrier a jitted caller's compiler merges std with the last factor inside normal, which changes
        # the last bit of half of the values against an unjitted call.
        return self.std * jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype))


@checked
def normal_init(std: float = TE_INIT_STD) -> NormalInit:
    """Return ``init(key, shape, dtype)`` that draws from N(0, std²).

    Raises:
        ValueError: if ``std`` is negative.

    Source: ``megatron.core.utils.init_method_normal``; TE's default is 0.023.

    >>> normal_init(0.0)(jax.random.key(0), (2,), jnp.float32).tolist()
    [0.0, 0.0]
    """
    return NormalInit(std)


@checked
def scaled_normal_init(std: float, num_layers: int) -> NormalInit:
    """Return `normal_init` with ``std / sqrt(2 num_layers)``, for projections that add to the residual stream.

    Raises:
        ValueError: if ``std`` is negative or ``num_layers`` below 1.

    Source: ``megatron.core.utils.scaled_init_method_normal``; Radford et al. 2019 (GPT-2).

    >>> scaled_normal_init(0.02, 2)(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be >= 1, got {num_layers!r}")
    return normal_init(std / math.sqrt(2.0 * num_layers))
