"""Dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.parallel import auto_region
from jax_te.typing import Array, LogicalAxes


def dropout(x: Array, rate: float, key: Array | None, *, axes: LogicalAxes) -> Array:
    """Zero each element with probability ``rate`` and divide the rest by ``1 - rate``.

    The identity for ``rate`` 0 or no key. Which elements are dropped depends on the key and the shape alone: it is
    the same on every mesh.

    Args:
        x: any shape and floating dtype, which the result has too.
        rate: in [0, 1).
        key: ``jax.random.key``, or None.
        axes: logical axes of ``x``.

    >>> dropout(jnp.ones(3), 0.5, None, axes=(None,)).tolist()
    [1.0, 1.0, 1.0]
    """
    if key is None or rate == 0.0:
        return x

    def drop(x: Array, key: Array) -> Array:
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))

    return auto_region(drop, axes)(x, key)
