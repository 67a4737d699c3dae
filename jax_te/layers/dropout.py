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


def drop_path(x: Array, rate: float, key: Array | None, *, axes: LogicalAxes) -> Array:
    """Zero each example of a batch with probability ``rate`` and divide the rest by ``1 - rate``: stochastic depth, for
    what a block adds to the residual stream.

    The identity for ``rate`` 0 or no key. It is the same on every mesh.

    Args:
        x: ``[b, ...]`` of any floating dtype, which the result has too.
        rate: in [0, 1).
        key: ``jax.random.key``, or None.
        axes: logical axes of ``x``.

    Source: ``drop_path_rate`` of ``transformer_engine.pytorch.TransformerLayer``; Huang et al. 2016.

    >>> drop_path(jnp.ones((2, 3)), 0.5, None, axes=(None, None)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if key is None or rate == 0.0:
        return x

    def drop(x: Array, key: Array) -> Array:
        keep = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))

    return auto_region(drop, axes)(x, key)
