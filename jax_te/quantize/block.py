"""FP8 with a scale for each 1 x 128 or 128 x 128 block, and for each 32 values (MXFP8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_te._validation import check_float, checked
from jax_te.quantize.quantizer import Quantizer, check_fp8
from jax_te.quantize.scaling import amax, compute_scale, power_of_two_scale
from jax_te.quantize.tensor import QuantizedTensor, as_matrix, expand_blocks
from jax_te.recipe import fp8_max
from jax_te.typing import Array

BLOCK = 128
MX_BLOCK = 32


def block_amax(x: Array, block: tuple[int, int]) -> Array:
    """Return each block's largest absolute value: ``x [R, C]`` -> fp32 ``[ceil(R / r), ceil(C / c)]``; nan wins.

    The last block of a row or column may be smaller.

    >>> block_amax(jnp.array([[1.0, -2.0, 3.0]]), (1, 2)).tolist()
    [[2.0, 3.0]]
    """
    (rows, columns), (r, c) = x.shape, block
    # The zeros of the padding do not change a block's amax.
    padded = jnp.pad(x, ((0, -rows % r), (0, -columns % c)))
    return amax(padded.reshape(-(-rows // r), r, -(-columns // c), c), axis=(1, 3))


def directed_block(block: tuple[int, int], columnwise: bool) -> tuple[int, int]:
    """Return the block oriented along the axis that the GEMM sums over.

    >>> directed_block((1, 128), columnwise=True)
    (128, 1)
    """
    return (block[1], block[0]) if columnwise else block


@checked
@dataclass(frozen=True, kw_only=True)
class BlockQuantizer(Quantizer):
    """FP8 with one fp32 scale ``max(dtype) / amax`` for every block; 1 for an amax of 0, nan for one of inf or nan.

    Args:
        dtype: float8_e4m3fn or float8_e5m2.
        two_dimensional: whether blocks are 128 x 128 instead of 1 x 128.
        power_of_two: whether to round scales down to powers of two.

    Source: ``transformer_engine.pytorch.Float8BlockQuantizer``.

    >>> from jax_te.quantize import quantize
    >>> q, _ = quantize(jnp.full((1, 128), 3.0), BlockQuantizer(dtype=jnp.float8_e4m3fn))
    >>> float(q.scale_inv[0, 0]), float(q.data[0, 0])
    (0.0078125, 384.0)
    """

    shard_multiple: ClassVar[int | None] = BLOCK

    two_dimensional: bool = False
    power_of_two: bool = True

    def __post_init__(self) -> None:
        check_fp8(self.dtype)

    @property
    def directional(self) -> bool:
        return not self.two_dimensional

    def quantize(
        self, x: Array, scale: Array | None, *, axis: int, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        check_float("BlockQuantizer", x)
        self._check_scale(scale)
        block = directed_block((BLOCK if self.two_dimensional else 1, BLOCK), columnwise)
        matrix = as_matrix(x, axis)
        scale_of = power_of_two_scale if self.power_of_two else compute_scale
        scales = scale_of(block_amax(matrix, block), self.dtype)
        limit = fp8_max(self.dtype)
        scaled = matrix.astype(jnp.float32) * expand_blocks(scales, block, matrix.shape)
        # A cast to FP8 does not saturate: beyond the limit it gives nan (E4M3) or inf (E5M2).
        data = jnp.clip(scaled, -limit, limit).astype(self.dtype)
        return QuantizedTensor(
            data=data.reshape(x.shape), scale_inv=1.0 / scales, dtype=x.dtype, block=block, axis=axis
        ), None


@dataclass(frozen=True, kw_only=True)
class MXQuantizer(Quantizer):
    """FP8 with a power-of-two scale for every 32 values; its reciprocal, E8M0, is ``amax / max(dtype)`` rounded up.

    An amax of inf gives the largest scale, 2^127, a nan gives nan.

    Args:
        dtype: float8_e4m3fn or float8_e5m2.

    Source: ``transformer_engine.jax.quantize.BlockScaleQuantizer``; OCP Microscaling Formats (MX) 1.0.

    >>> from jax_te.quantize import quantize
    >>> q, _ = quantize(jnp.full((1, 32), 3.0), MXQuantizer(dtype=jnp.float8_e4m3fn))
    >>> float(q.scale_inv[0, 0]), float(q.data[0, 0])
    (0.0078125, 384.0)
    """

    alignment: ClassVar[int] = MX_BLOCK
    shard_multiple: ClassVar[int | None] = MX_BLOCK

    def __post_init__(self) -> None:
        check_fp8(self.dtype)

    @checked
    def quantize(
        self, x: Array, scale: Array | None, *, axis: int, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        check_float("MXQuantizer", x)
        self._check_scale(scale)
        block = directed_block((1, MX_BLOCK), columnwise)
        matrix = as_matrix(x, axis)
        limit = fp8_max(self.dtype)
        # Multiplied by the reciprocal, as in TE's kernels; XLA compiles a division by a constant to that anyway.
        exponents = _exponents_rounded_up(block_amax(matrix, block) * (1.0 / limit))
        scaled = matrix.astype(jnp.float32)
        # In two steps, since one factor could be subnormal, see `_reciprocal_factors`.
        for factor in _reciprocal_factors(exponents):
            scaled = scaled * expand_blocks(factor, block, matrix.shape)
        data = jnp.clip(scaled, -limit, limit).astype(self.dtype)
        return QuantizedTensor(
            data=data.reshape(x.shape),
            scale_inv=jax.lax.bitcast_convert_type(exponents, jnp.float8_e8m0fnu),
            dtype=x.dtype,
            block=block,
            axis=axis,
        ), None


def _exponents_rounded_up(x: Array) -> Array:
    """Return biased exponents, uint8, of the least powers of two >= ``x`` (fp32, >= 0).

    0 gives 2^-127: E8M0 has no zero.
    """
    # Integer arithmetic, because log2 and exp2 are not exact on every device.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal x (exponent 0) is rounded up to 2^-126 only if it exceeds 2^-127. E8M0 ends at 2^127 (0xFE), which
    # inf gets, too; 0xFF is its nan.
    up = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    capped = jnp.where((exponent == 0xFF) & (mantissa == 0), 0xFE, exponent + up.astype(jnp.uint32))
    return capped.astype(jnp.uint8)


def _reciprocal_factors(exponents: Array) -> tuple[Array, Array]:
    """Return two fp32 powers of two whose product is ``2^(127 - e)`` for biased exponents ``e``; 255 gives nan."""
    # One factor is subnormal at the end of the range, and processors may flush it to 0.
    whole = 127 - exponents.astype(jnp.int32)
    half = whole // 2
    first, second = (jax.lax.bitcast_convert_type((part + 127) << 23, jnp.float32) for part in (half, whole - half))
    return jnp.where(exponents == 0xFF, jnp.nan, first), second
