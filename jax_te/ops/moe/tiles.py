"""Conversion of groups' rows into tiles of one group each, and back, around the grouped GEMMs."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_te.ops.moe.row_groups import RowGroups, row_bound, tile_of
from jax_te.ops.wide import wide_dtype
from jax_te.quantize import GroupTiles, Precision, padded_size
from jax_te.typing import Array


class Tiling(NamedTuple):
    """Static tiling of rows laid out by `RowGroups`.

    Args:
        rows: number of rows of all tiles together.
        tile: rows of one tile.
        in_place: whether the rows lie as the tiles do, except zeros after the last.
        zero_padding: rows of padding hold zeros already.
    """

    rows: int
    tile: int
    in_place: bool
    zero_padding: bool


def tiling(groups: RowGroups, precision: Precision) -> Tiling:
    """Return the tiles in which the rows of ``groups`` are quantized and multiplied."""
    if groups.own_count == 1:
        # One tile, padded as one layer's rows are: its GEMMs are that layer's.
        rows = padded_size(max(groups.rows, 1), precision.alignment)
        return Tiling(rows, rows, True, groups.zero_padding)
    tile = tile_of(precision)
    if groups.rows > 0 and groups.alignment % tile == 0:
        return Tiling(padded_size(groups.rows, groups.alignment), groups.alignment, True, groups.zero_padding)
    return Tiling(row_bound(groups.rows, groups.own_count, alignment=tile), tile, False, groups.zero_padding)


class TiledGroups:
    """Values of a `Tiling` at run time: each row's position among the tiles, and each tile's group."""

    def __init__(self, groups: RowGroups, how: Tiling):
        self._how, self._count, self._rows = how, groups.count, groups.rows
        self._group = groups.of_rows()
        fits = jnp.clip(groups.rows - groups.starts, 0, groups.sizes).astype(jnp.int32)
        placed = RowGroups(sizes=fits, rows=how.rows, alignment=how.tile)
        if how.in_place:
            self._from = self._to = None
        else:
            # Behind the last group both are out of range, and read as zeros.
            of_tiles, shift = placed.of_rows(), groups.starts - placed.starts
            self._from = _places(of_tiles, shift, groups.rows)
            self._to = _places(self._group, -shift, how.rows)
        first = jnp.arange(0, how.rows, how.tile, dtype=jnp.int32)
        starts = placed.starts
        # Tiles behind the last group, all of zeros, count as its own.
        group = jnp.sum(first[:, None] >= starts[None], axis=1, dtype=jnp.int32) - 1
        self.tiles = GroupTiles(group, first - starts[group], fits)

    @property
    def group_of_rows(self) -> Array:
        """The group of each row of the array, int32 ``[rows]``; ``e`` for padding."""
        return self._group

    def cut(self, x: Array) -> Array:
        """Return ``x [rows, *c]`` in tiles ``[tiles, t, *c]``, with padding set to zero."""
        if self._from is None:
            x = self.without_padding(x)
            x = jnp.pad(x, ((0, self._how.rows - self._rows), *((0, 0) for _ in x.shape[1:])))
        else:
            # An array without rows has none to take, not even out of range.
            x = jnp.pad(x, ((0, 1), *((0, 0) for _ in x.shape[1:]))) if self._rows == 0 else x
            x = jnp.take(x, self._from, axis=0, mode="fill", fill_value=0)
        return x.reshape(-1, self._how.tile, *x.shape[1:])

    def joined(self, y: Array) -> Array:
        """Return ``[rows, *c]`` from the rows of all tiles, with padding set to zero."""
        if self._to is None:
            return self.without_padding(y[: self._rows])
        return jnp.take(y, self._to, axis=0, mode="fill", fill_value=0)

    def sums(self, x: Array, tiles: Array) -> Array:
        """Return the sum of each group's rows, fp32 (of fp64: fp64) ``[e, *c]``.

        They are read from ``x [rows, *c]`` or from its ``tiles``.
        """
        if self._count == 1:
            # Without the padding, with which a sum may have another order.
            return jnp.sum(self.without_padding(x), axis=0, dtype=wide_dtype(x.dtype))[None]
        return self.tiles.sum(jnp.sum(tiles, axis=1, dtype=wide_dtype(x.dtype)))

    def without_padding(self, x: Array) -> Array:
        """Return ``x [rows, *c]`` with padding set to zero."""
        if self._how.zero_padding:
            return x
        valid = (self._group < self._count).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(valid, x, jnp.zeros((), x.dtype))


def _places(group: Array, shift: Array, bound: int) -> Array:
    """Return the source index of each row: its own index plus its group's shift; ``bound`` for padding."""
    row, count = jnp.arange(group.shape[0], dtype=jnp.int32), shift.shape[0]
    return jnp.where(group < count, row + shift[jnp.minimum(group, count - 1)], bound)
