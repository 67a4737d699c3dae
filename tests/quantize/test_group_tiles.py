"""Rows of several groups, quantized in tiles: each group's bits are those of its rows alone."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.quantize import (
    BlockQuantizer,
    GroupTiles,
    MXQuantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    TensorQuantizer,
    pad_rows,
    quantize_operand,
    quantize_tiles,
)
from jax_te.quantize.nvfp4 import _place
from tests.support.numerics import assert_bitwise, draw, quick_jit

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
QUANTIZERS = {
    "current": TensorQuantizer(dtype=E4M3),
    "powers of two": TensorQuantizer(dtype=E5M2, power_of_two=True),
    "delayed": TensorQuantizer(dtype=E4M3, scaling="given"),
    "block": BlockQuantizer(dtype=E4M3),
    "squares": BlockQuantizer(dtype=E4M3, two_dimensional=True),
    "mxfp8": MXQuantizer(dtype=E4M3),
    "nvfp4": NVFP4Quantizer(hadamard=True),
    "nvfp4 stochastic": NVFP4Quantizer(hadamard=True, stochastic_rounding=True),
}
SIZES = (1, 0, 130)
COLUMNS = 48


def tiled(groups: list[np.ndarray], tile: int) -> tuple[jax.Array, GroupTiles]:
    """Rows of groups in tiles, with one tile of zeros behind the last."""
    tiles, group, first = [], [], []
    for index, rows in enumerate(groups):
        padded = np.pad(rows, ((0, -len(rows) % tile), (0, 0)))
        for start in range(0, len(padded), tile):
            tiles.append(padded[start : start + tile])
            group.append(index)
            first.append(start)
    tiles.append(np.zeros_like(tiles[0]))
    group.append(len(groups) - 1)
    first.append(first[-1] + tile)
    sizes = np.array([len(rows) for rows in groups], np.int32)
    return jnp.asarray(np.stack(tiles)), GroupTiles(
        *(jnp.asarray(np.array(v, np.int32)) for v in (group, first, sizes))
    )


@pytest.mark.costly("current", slow=("mxfp8", "block"))
@pytest.mark.wide("current", "delayed", "block", "mxfp8")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_group_has_the_bits_of_its_rows_alone(name):
    quantizer = QUANTIZERS[name]
    tile = max(32, quantizer.shard_multiple or 1)
    # Groups of different magnitudes, so that another group's scale would show.
    groups = [np.asarray(draw(f"group {i}", (n, COLUMNS), jnp.bfloat16, scale=8.0**i)) for i, n in enumerate(SIZES)]
    x, tiles = tiled(groups, tile)
    scale = jnp.asarray([3.0, 5.0, 0.7], jnp.float32) if name == "delayed" else None

    @quick_jit
    def of_tiles(x, tiles, scale):
        operand, amaxes = quantize_tiles(x, quantizer, tiles, scale)
        return operand, jax.tree.map(jax.vmap(QuantizedTensor.values), operand, is_leaf=is_form), amaxes

    @quick_jit
    def of_rows(x, scale):
        operand, amax = quantize_operand(x, quantizer, scale, axis=1)
        return operand, jax.tree.map(QuantizedTensor.values, operand, is_leaf=is_form), amax

    both, values, amaxes = of_tiles(x, tiles, scale)
    for index, rows in enumerate(groups):
        alone, own_values, amax = of_rows(pad_rows(jnp.asarray(rows), 1, 32), None if scale is None else scale[index])
        if amax is not None:
            assert_bitwise(amaxes[index], amax)
        mine = np.flatnonzero(np.asarray(tiles.group) == index)[: -(-len(rows) // tile)]
        for form, value, expected, expected_value in (
            (both.rowwise, values.rowwise, alone.rowwise, own_values.rowwise),
            (both.columnwise, values.columnwise, alone.columnwise, own_values.columnwise),
        ):
            assert (form is None) == (expected is None)
            if form is not None:
                # Values times scales are compared, too, so that the scales are.
                for got, wanted in ((form.data, expected.data), (value, expected_value)):
                    of_group = np.asarray(got)[mine].reshape(-1, COLUMNS)[: len(rows)]
                    assert_bitwise(of_group, np.asarray(wanted)[: len(rows)])


def is_form(node):
    return isinstance(node, QuantizedTensor)


def test_a_nan_stays_in_its_group():
    groups = [np.full((4, 16), np.nan, np.float32), np.ones((4, 16), np.float32)]
    x, tiles = tiled(groups, 16)
    _, amaxes = quantize_tiles(x, QUANTIZERS["current"], tiles)
    assert np.isnan(amaxes[0])
    assert amaxes[1] == 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Quantizer):
    """A user's quantizer whose scale is that of a whole tensor."""

    shard_multiple: ClassVar[int | None] = None
    dtype: jnp.dtype = E4M3

    def quantize(self, x, scale, *, axis, columnwise):
        return QUANTIZERS["current"].quantize(x, scale, axis=axis, columnwise=columnwise)


def test_a_quantizer_that_tiles_would_cut_is_refused():
    x, tiles = tiled([np.ones((4, 16), np.float32)] * 2, 32)
    with pytest.raises(ValueError, match="Whole cannot quantize rows of several groups in tiles of 32"):
        quantize_tiles(x, Whole(), tiles)
    with pytest.raises(ValueError, match="shard_multiple=128"):
        quantize_tiles(x, QUANTIZERS["block"], tiles)


def test_places_of_random_bits_beyond_32_bits():
    rows, columns = jnp.asarray([0, 5, 2**31, 2**32 - 1], jnp.uint32), 100_003
    high, low = _place(rows, columns)
    expected = np.array([0, 5, 2**31, 2**32 - 1], object)[:, None] * columns + np.arange(columns, dtype=object)
    assert ((np.asarray(high).astype(object) << 32) + np.asarray(low).astype(object) == expected).all()
