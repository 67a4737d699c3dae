"""Type aliases used in signatures across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.typing import ArrayLike, DTypeLike

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
LogicalAxes: TypeAlias = tuple[str | None, ...]
"""One logical axis name (or None) for each dimension of an array."""

Initializer: TypeAlias = Callable[..., Array]
"""``init(key, shape, dtype) -> array``, as in ``jax.nn.initializers``."""

__all__ = ["Array", "ArrayLike", "DTypeLike", "Initializer", "LogicalAxes", "PyTree"]
