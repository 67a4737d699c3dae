"""Dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops import zigzag_positions
from jax_te.sharding import auto_region
from jax_te.sharding.internal import axis_ranks
from jax_te.typing import Array, LogicalAxes

_SEQUENCE = ("sequence", "sequence_parallel")


def dropout(x: Array, rate: float, key: Array | None, *, axes: LogicalAxes, zigzag: bool = False) -> Array:
    """Zero each element with probability ``rate`` and divide the rest by ``1 - rate``.

    The identity for ``rate`` 0 or no key. Which elements are dropped depends on the key, the shape and positions in
    the sequence alone: it is the same on every mesh, and in zig-zag order.

    Args:
        x: any shape and floating dtype, which the result has too.
        rate: in [0, 1).
        key: ``jax.random.key``, or None.
        axes: logical axes of ``x``.
        zigzag: context ranks have the axis that is called a sequence in zig-zag order.

    >>> dropout(jnp.ones(3), 0.5, None, axes=(None,)).tolist()
    [1.0, 1.0, 1.0]
    """
    if key is None or rate == 0.0:
        return x

    def drop(x: Array, key: Array) -> Array:
        keep = _kept(key, 1.0 - rate, x.shape, axes, zigzag)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))

    return auto_region(drop, axes)(x, key)


def _kept(key: Array, probability: float, shape: tuple[int, ...], axes: LogicalAxes, zigzag: bool) -> Array:
    """Which elements stay. Every position has a key of its own, so that a rank draws for those that it has alone."""
    axis = next((axis for axis, name in enumerate(axes) if name in _SEQUENCE), None)
    if axis is None:
        return jax.random.bernoulli(key, probability, shape)
    s, rest = shape[axis], (*shape[:axis], *shape[axis + 1 :])
    reordered = zigzag and axis_ranks("sequence") > 1
    positions = zigzag_positions(s) if reordered else jnp.arange(s, dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)
    return jax.vmap(lambda key: jax.random.bernoulli(key, probability, rest), out_axes=axis)(keys)


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
