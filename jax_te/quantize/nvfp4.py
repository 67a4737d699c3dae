"""FP4 with an E4M3 scale for every 16 values and an fp32 scale for the tensor."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jax_te._validation import check_float, checked, dtype_name
from jax_te.quantize.block import block_amax, directed_block
from jax_te.quantize.group_tiles import GroupTiles
from jax_te.quantize.hadamard import hadamard_rows
from jax_te.quantize.quantizer import Quantizer
from jax_te.quantize.scaling import amax
from jax_te.quantize.tensor import QuantizedTensor, as_matrix, expand_blocks
from jax_te.recipe import E2M1_MAX, E4M3_MAX
from jax_te.typing import Array, DTypeLike

NVFP4_BLOCK = 16
_LARGEST = float(jnp.finfo(jnp.float32).max)


@checked
@dataclass(frozen=True, kw_only=True)
class NVFP4Quantizer(Quantizer):
    """E2M1 values, an E4M3 scale for every 16 of them, one fp32 scale for the tensor.

    ``s = 6 * 448 / amax(x)``; a block's reciprocal scale is ``e4m3(amax(block) / 6 * s)``; its values are
    ``x * s / e4m3(...)`` rounded to E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6. All are nan if ``amax(x)`` is inf or nan.

    Args:
        two_dimensional: whether blocks are 16 x 16 instead of 1 x 16, for kernels.
        hadamard: whether to rotate by `hadamard_rows` before the columnwise quantization, which the weight gradient
            reads.
        stochastic_rounding: whether to round up with a probability that is the distance from the value below. The
            random bits are a function of the tensor's own values, so the same tensor is always rounded the same way.

    Source: ``transformer_engine.jax.quantize.NVFP4Quantizer``; NVIDIA 2025, "Pretraining Large Language Models with
        NVFP4", appendix C.

    >>> from jax_te.quantize import quantize
    >>> q, _ = quantize(jnp.array([[6.0, 3.0, 1.6, 0.3] * 4]), NVFP4Quantizer())
    >>> q.data[0, :4].astype(jnp.float32).tolist(), float(q.scale_inv[0, 0])
    ([6.0, 3.0, 1.5, 0.5], 448.0)
    """

    alignment: ClassVar[int] = 32

    dtype: DTypeLike = jnp.float4_e2m1fn
    two_dimensional: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if (name := dtype_name(self.dtype)) != "float4_e2m1fn":
            raise TypeError(f"NVFP4Quantizer's dtype must be float4_e2m1fn, got {name}")

    @property
    def directional(self) -> bool:
        return not self.two_dimensional or self.hadamard

    def quantize(
        self, x: Array, scale: Array | None, *, axis: int, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        check_float("NVFP4Quantizer", x)
        self._check_scale(scale)
        matrix = as_matrix(x, axis)
        rotated = self._rotated(matrix, columnwise)
        bits = _random_bits(matrix, columnwise) if self.stochastic_rounding else None
        return self._quantize(x, rotated, amax(rotated), bits, axis=axis, columnwise=columnwise), None

    def quantize_tiles(
        self, x: Array, tiles: GroupTiles, scale: Array | None, *, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        matrices = x.reshape(*x.shape[:2], -1)
        rotated = jax.vmap(lambda matrix: self._rotated(matrix, columnwise))(matrices)
        amaxes = tiles.amax(amax(rotated, axis=(1, 2)))[tiles.group]
        bits = _random_bits_of_tiles(matrices, tiles, columnwise) if self.stochastic_rounding else None
        return jax.vmap(functools.partial(self._quantize, axis=1, columnwise=columnwise))(
            x, rotated, amaxes, bits
        ), None

    def _rotated(self, matrix: Array, columnwise: bool) -> Array:
        # The weight gradient reads this form. Its other operand is rotated in the same way, so the rotation cancels
        # out.
        return hadamard_rows(matrix) if self.hadamard and columnwise else matrix

    def _quantize(
        self, x: Array, matrix: Array, tensor_amax: Array, bits: Array | None, *, axis: int, columnwise: bool
    ) -> QuantizedTensor:
        """Quantize ``matrix``, which is ``x`` or its rotation, under the amax of its whole tensor."""
        block = directed_block((NVFP4_BLOCK if self.two_dimensional else 1, NVFP4_BLOCK), columnwise)
        tensor_scale = jnp.minimum(E2M1_MAX * E4M3_MAX / tensor_amax, _LARGEST)
        # An amax of inf gives nan, as one of nan does: E2M1 has neither, and clipping would hide them.
        tensor_scale = jnp.where(tensor_scale == 0.0, jnp.nan, tensor_scale)
        # Without the barrier XLA merges these constants with those below under jit, which rounds differently.
        tensor_scale, block_inv = jax.lax.optimization_barrier(
            (tensor_scale, block_amax(matrix, block) * (1.0 / E2M1_MAX))
        )
        tensor_scale_inv = 1.0 / tensor_scale
        # The values are scaled by the rounded scale, because the GEMM divides by it.
        block_inv = jax.lax.optimization_barrier(_round_e4m3(jnp.minimum(block_inv * tensor_scale, E4M3_MAX)))
        scales = jnp.minimum(1.0 / (block_inv * tensor_scale_inv), _LARGEST)
        scaled = matrix.astype(jnp.float32) * expand_blocks(scales, block, matrix.shape)
        scaled = jnp.clip(scaled, -E2M1_MAX, E2M1_MAX)
        rounded = _round_e2m1(scaled, bits)
        return QuantizedTensor(
            data=rounded.astype(self.dtype).reshape(x.shape),
            scale_inv=block_inv.astype(jnp.float8_e4m3fn),
            tensor_scale_inv=tensor_scale_inv,
            dtype=x.dtype,
            block=block,
            axis=axis,
            rotated=self.hadamard and columnwise,
        )


def _round_e4m3(x: Array) -> Array:
    """Return ``x`` in [0, 448] rounded to E4M3, in fp32."""
    # Not by a cast to E4M3 and back, which compilers may drop as a pair. reduce_precision does not support the narrow
    # format's subnormal numbers, which are multiples of 2^-9 below 2^-6; 8 exponent bits, since with 4 bits 448 would
    # be inf.
    subnormal = jnp.round(x * 2.0**9) * 2.0**-9
    return jnp.where(x < 2.0**-6, subnormal, jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3))


def _round_e2m1(x: Array, bits: Array | None) -> Array:
    """Return ``x`` in [-6, 6] rounded to E2M1, in fp32: to nearest even, or stochastically with uint16 ``bits``."""
    magnitude = jnp.abs(x)
    step = jnp.where(magnitude < 2.0, 0.5, jnp.where(magnitude < 4.0, 1.0, 2.0))
    steps = magnitude / step
    if bits is None:
        return jnp.sign(x) * jnp.round(steps) * step
    below = jnp.floor(steps)
    # Compared as fp32, in which uint16 is exact: P(up) is the distance from below, in steps of 2^-16.
    up = (steps - below) * 2.0**16 > bits.astype(jnp.float32)
    return jnp.sign(x) * (below + up.astype(jnp.float32)) * step


def rounding_key(x: Array) -> Array:
    """Return the key of a tensor's stochastic rounding: a checksum of the values of ``x [R, C]`` and their positions.

    Because the key is a function of the tensor, there is no random state, recomputation rounds like the first pass, and
    results do not depend on the sharding.
    """
    rows = jax.lax.broadcasted_iota(jnp.uint32, x.shape, 0)
    return _key_of(*(jnp.sum(words, dtype=jnp.uint32) for words in _checked_words(x, rows)))


def _checked_words(x: Array, rows: Array) -> tuple[Array, Array]:
    """Return the summands of two checksums of ``x [R, C]``: uint32, in its shape. ``rows`` are the indices of its
    rows."""
    words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    columns = jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1)
    words = _mixed(_mixed(words + rows * jnp.uint32(0x9E3779B1)) + columns * jnp.uint32(0x85EBCA77))
    # Sums modulo 2^32 do not depend on the order of additions. Two of them make an accidental agreement unlikely.
    return words, words * words


def _key_of(*checksums: Array) -> Array:
    """Return the key derived from two checksums, uint32 ``[]``."""
    # threefry, whatever the default is: the bits of rbg depend on the sharding.
    key = jax.random.key(0, impl="threefry2x32")
    for checksum in checksums:
        key = jax.random.fold_in(key, checksum)
    return key


def _random_bits(x: Array, columnwise: bool) -> Array:
    """Return random uint16 like ``x [R, C]``."""
    return jax.random.bits(jax.random.fold_in(rounding_key(x), columnwise), x.shape, jnp.uint16)


def _random_bits_of_tiles(x: Array, tiles: GroupTiles, columnwise: bool) -> Array:
    """Return uint16 like ``x [tiles, t, C]``: for each group the bits that `_random_bits` returns for its rows
    alone."""
    _, t, columns = x.shape
    rows = (tiles.first[:, None] + jnp.arange(t, dtype=tiles.first.dtype)[None]).astype(jnp.uint32)
    # A GEMM's operand has a multiple of `alignment` rows, see `jax_te.quantize.padding`. Zeros count in the checksum.
    whole = -(-jnp.maximum(tiles.rows, 1) // NVFP4Quantizer.alignment) * NVFP4Quantizer.alignment
    counted = (rows < whole[tiles.group][:, None].astype(jnp.uint32))[:, :, None]
    checksums = []
    for words in jax.vmap(_checked_words)(x, jnp.broadcast_to(rows[:, :, None], x.shape)):
        checksums.append(tiles.sum(jnp.sum(jnp.where(counted, words, 0), axis=(1, 2), dtype=jnp.uint32)))
    keys = jax.vmap(lambda *sums: jax.random.fold_in(_key_of(*sums), columnwise))(*checksums)

    def of_tile(key: Array, rows: Array) -> Array:
        # As `jax.random.bits` does with ``jax_threefry_partitionable``, JAX's default: the bits of an element depend on
        # its position in the whole array, of which a tile is a part.
        high, low = _place(rows, columns)
        words = threefry_2x32(key, jnp.concatenate([high.ravel(), low.ravel()]))  # type: ignore[arg-type]
        return (words[: t * columns] ^ words[t * columns :]).astype(jnp.uint16).reshape(t, columns)

    return jax.vmap(of_tile)(jax.random.key_data(keys)[tiles.group], rows)


def _place(rows: Array, columns: int) -> tuple[Array, Array]:
    """Return ``row * columns + column`` of each element of some rows, uint32 ``[t]``: upper and lower 32 bits."""
    column = jnp.arange(columns, dtype=jnp.uint32)
    # Four products of 16 bits by 16 bits, whose sums carry into the upper half.
    low, outer = (rows & 0xFFFF) * (columns & 0xFFFF), (rows >> 16) * (columns >> 16)
    inner = (rows & 0xFFFF) * (columns >> 16), (rows >> 16) * (columns & 0xFFFF)
    carry = ((low >> 16) + sum(part & 0xFFFF for part in inner)) >> 16
    start_high, start_low = outer + sum(part >> 16 for part in inner) + carry, rows * jnp.uint32(columns)
    place = start_low[:, None] + column[None]
    return start_high[:, None] + (place < column[None]).astype(jnp.uint32), place


def _mixed(words: Array) -> Array:
    """Return a bijection of uint32 in which every bit depends on every other (MurmurHash3's finalizer)."""
    # Sums of unmixed words would hardly differ: the lower half of a bf16 value and of its square is 0.
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
