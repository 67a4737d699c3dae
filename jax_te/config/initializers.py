"""Initial distributions as fields of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_te.typing import DTypeLike


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


@dataclass(frozen=True)
class FilledInit(NormalInit):
    """A `NormalInit` that a configuration filled in, so that ``dataclasses.replace`` derives it from the new fields."""
