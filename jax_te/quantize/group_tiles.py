"""Rows of several groups, cut into tiles of one group each: the group of each tile, for scales of whole groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_te.quantize.scaling import amax
from jax_te.typing import Array


class GroupTiles(NamedTuple):
    """Group of each tile ``[t, *c]`` of an array ``[tiles, t, *c]``. Rows that belong to no group are zeros.

    Args:
        group: int32 ``[tiles]``, the group of each tile.
        first: int32 ``[tiles]``, the place of a tile's first row among the rows of its group.
        rows: int32 ``[e]``, the number of rows of each group.

    >>> tiles = GroupTiles(jnp.array([0, 0, 1]), jnp.array([0, 16, 0]), jnp.array([20, 3]))
    >>> tiles.amax(jnp.array([1.0, 3.0, 2.0])).tolist()
    [3.0, 2.0]
    """

    group: Any
    first: Any
    rows: Any

    @property
    def count(self) -> int:
        """Number of groups, ``e``."""
        return self.rows.shape[0]

    def amax(self, of_tiles: Array) -> Array:
        """Return the amax of each group, fp32 ``[e]``, from those of the tiles ``[tiles]``; nan wins."""
        return amax(_of_groups(of_tiles, self.group, self.count), axis=1)

    def sum(self, of_tiles: Array) -> Array:
        """Return the sums of ``[tiles, ...]`` over the tiles of each group, ``[e, ...]``, in the same dtype."""
        return sum_of_groups(of_tiles, self.group, self.count)


def sum_of_groups(of_tiles: Array, group: Array, count: int) -> Array:
    """Return the sums of ``[tiles, ...]`` over the tiles of each of ``count`` groups, ``[e, ...]``, in the same dtype.

    >>> sum_of_groups(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 0, 1]), 2).tolist()
    [4.0, 2.0]
    """
    return jnp.sum(_of_groups(of_tiles, group, count), axis=1, dtype=of_tiles.dtype)


def _of_groups(of_tiles: Array, group: Array, count: int) -> Array:
    """Return ``[e, tiles, ...]``: each group's tiles in their places, and zeros in the others'."""
    # Selected, not multiplied by 0 or added by scatter: a nan stays in its group, and the order of additions on a GPU
    # is fixed.
    own = group[None] == jnp.arange(count, dtype=group.dtype)[:, None]
    own = own.reshape(*own.shape, *(1,) * (of_tiles.ndim - 1))
    return jnp.where(own, of_tiles[None], jnp.zeros((), of_tiles.dtype))
