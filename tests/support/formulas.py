"""The block-scaled formats in NumPy, from their papers and specifications. Nothing here is taken from jax_te or JAX.

Arithmetic is fp32 with subnormals as zeros, which is what XLA computes with on CPU. Matrices are ``[R, C]``; a block is
``(rows, columns)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.support import oracles
from tests.support.oracles import F32, F32_MAX, FP8_MAX, flush

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIGN_MASK = 0xD7E8  # Transformer Engine's fixed signs: -1 where the bit is set


@dataclass
class Quantized:
    """Values, reciprocal scales by block, and what the values were before they were rounded."""

    data: np.ndarray
    scale_inv: np.ndarray
    block: tuple[int, int]
    scaled: np.ndarray
    tensor_scale_inv: np.float32 | None = None
    rotated: bool = False

    def values(self) -> np.ndarray:
        """Values times scales in fp64."""
        scales = spread(self.scale_inv.astype(np.float64), self.block, self.data.shape)
        if self.tensor_scale_inv is not None:
            scales = scales * np.float64(self.tensor_scale_inv)
        return self.data.astype(np.float64) * scales


def block_amaxes(matrix: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Largest absolute value of every block; those at the end may be smaller."""
    (rows, columns), (r, c) = matrix.shape, block
    return F32([[oracles.amax(matrix[i : i + r, j : j + c]) for j in range(0, columns, c)] for i in range(0, rows, r)])


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Each block's scale at each of its elements."""
    rows, columns = (np.arange(size) // step for size, step in zip(shape, block, strict=True))
    return scales[np.ix_(rows, columns)]


def power_below(x: np.ndarray) -> np.ndarray:
    """The largest power of two that is not above ``x``; nan for nan."""
    return np.where(np.isnan(x), F32(np.nan), F32(np.ldexp(1.0, np.frexp(np.float64(x))[1] - 1)))


def fp8_tensor(matrix: np.ndarray, dtype: np.dtype, *, power_of_two: bool) -> Quantized:
    """One scale for all, ``max / amax``."""
    return fp8_blocks(matrix, dtype, matrix.shape, power_of_two=power_of_two)


def fp8_blocks(matrix: np.ndarray, dtype: np.dtype, block: tuple[int, int], *, power_of_two: bool) -> Quantized:
    """DeepSeek-V3, section 3.3: every block is scaled so that its amax becomes the largest value."""
    amaxes = block_amaxes(matrix, block)
    scales = F32([[oracles.scale_from_amax(a, dtype) for a in row] for row in amaxes])
    if power_of_two:
        scales = power_below(scales)
    everywhere = spread(scales, block, matrix.shape)
    with np.errstate(all="ignore"):
        scaled = flush(flush(matrix.astype(F32)) * everywhere)
    return Quantized(oracles.quantize(matrix, dtype, everywhere), flush(F32(1) / scales), block, scaled)


def mx_blocks(matrix: np.ndarray, dtype: np.dtype, block: tuple[int, int]) -> Quantized:
    """OCP MX: a power of two in [2^-127, 2^127] for each block; the least one under which no value is too large."""
    amaxes = flush(block_amaxes(matrix, block)).astype(np.float64)
    with np.errstate(all="ignore"):
        quotient = amaxes / FP8_MAX[dtype]
        mantissa, exponent = np.frexp(quotient)
        exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -127, 127)
        exponent = np.where(quotient < np.finfo(F32).tiny, -127, np.where(np.isinf(amaxes), 127, exponent))
        scale_inv = np.where(np.isnan(amaxes), np.nan, np.ldexp(1.0, exponent))
        scaled = flush(matrix.astype(F32)).astype(np.float64) / spread(scale_inv, block, matrix.shape)
        scaled = np.where(np.isnan(spread(scale_inv, block, matrix.shape)), np.nan, scaled)
        clipped = np.clip(scaled, -FP8_MAX[dtype], FP8_MAX[dtype])
        return Quantized(oracles.round_fp8(clipped, dtype).astype(dtype), scale_inv.astype(E8M0), block, scaled)


def nvfp4_blocks(matrix: np.ndarray, block: tuple[int, int], *, hadamard: bool = False) -> Quantized:
    """NVIDIA 2025, appendix C: E4M3 scales of blocks under one fp32 scale; ``/ 6`` is a product, as in TE's kernels."""
    if hadamard:
        matrix = rotate(matrix)
    with np.errstate(all="ignore"):
        amax = flush(oracles.amax(matrix))
        tensor_scale = np.minimum(F32(6 * 448) / amax, F32_MAX)
        tensor_scale = F32(np.nan) if tensor_scale == 0 else F32(tensor_scale)  # an amax of inf
        tensor_scale_inv = F32(flush(F32(1) / tensor_scale))
        wanted = flush(flush(flush(block_amaxes(matrix, block)) * F32(1 / 6)) * tensor_scale)
        scale_inv = np.minimum(wanted, F32(448)).astype(oracles.E4M3)
        product = flush(scale_inv.astype(F32) * tensor_scale_inv)
        scales = np.minimum(F32(1) / product, F32_MAX)
        scaled = flush(flush(matrix.astype(F32)) * spread(scales, block, matrix.shape))
    scaled = np.clip(scaled, F32(-6), F32(6))
    return Quantized(scaled.astype(E2M1), scale_inv, block, scaled, tensor_scale_inv, hadamard)


def hadamard() -> np.ndarray:
    """``diag(signs) H / 4`` by the definition of Sylvester's matrix: ``H[i, j] = (-1)^(number of common bits)``."""
    matrix = [[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    signs = [-1.0 if _SIGN_MASK >> i & 1 else 1.0 for i in range(16)]
    return np.array(signs)[:, None] * np.array(matrix) / 4.0


def rotate(matrix: np.ndarray) -> np.ndarray:
    """Every 16 rows times the Hadamard matrix, in fp64, rounded to the matrix's dtype."""
    blocks = matrix.astype(np.float64).reshape(-1, 16, matrix.shape[1])
    rotated = np.einsum("ij,bic->bjc", hadamard(), blocks).reshape(matrix.shape)
    return rotated.astype(F32).astype(matrix.dtype)


def neighbours(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The E2M1 values next to each value in [-6, 6], towards 0 and away from it; the value itself if it is one."""
    size = np.abs(scaled).astype(np.float64)
    above = np.minimum(np.searchsorted(_E2M1_VALUES, size), 7)
    below = np.where(_E2M1_VALUES[above] == size, above, above - 1)
    sign = np.where(scaled < 0, -1.0, 1.0)
    return sign * _E2M1_VALUES[below], sign * _E2M1_VALUES[above]


def half_spacing(scaled: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half the distance between a format's numbers around ``scaled``: the most that rounding to nearest errs by."""
    size = np.abs(np.asarray(scaled, np.float64))
    if dtype == E2M1:
        return np.where(size < 2, 0.25, np.where(size < 4, 0.5, 1.0))
    bits, least = {oracles.E4M3: (3, -6), oracles.E5M2: (2, -14)}[dtype]
    exponent = np.frexp(size)[1] - 1
    return np.ldexp(0.5, np.maximum(exponent, least) - bits)


# ---------------------------------------------------------------- what each recipe does to each operand

Formula = Callable[[np.ndarray, bool], Quantized]
"""``(matrix, columnwise) -> Quantized``."""


def turned(block: tuple[int, int], columnwise: bool) -> tuple[int, int]:
    """The block along the axis that is summed over."""
    return block[::-1] if columnwise else block


def tensor_formula(dtype: np.dtype, *, power_of_two: bool = False) -> Formula:
    return lambda matrix, columnwise: fp8_tensor(matrix, dtype, power_of_two=power_of_two)


def block_formula(dtype: np.dtype, *, two_dimensional: bool = False, power_of_two: bool = True) -> Formula:
    block = (128, 128) if two_dimensional else (1, 128)
    return lambda matrix, columnwise: fp8_blocks(matrix, dtype, turned(block, columnwise), power_of_two=power_of_two)


def mx_formula(dtype: np.dtype) -> Formula:
    return lambda matrix, columnwise: mx_blocks(matrix, dtype, turned((1, 32), columnwise))


def nvfp4_formula(*, two_dimensional: bool = False, hadamard: bool = False) -> Formula:
    block = (16, 16) if two_dimensional else (1, 16)
    return lambda matrix, columnwise: nvfp4_blocks(matrix, turned(block, columnwise), hadamard=hadamard and columnwise)


class FormulaScales(oracles.Scales):
    """Quantization of one linear layer's operands by a formula for each role; None keeps one in high precision."""

    def __init__(self, x: Formula | None, kernel: Formula | None, grad: Formula | None):
        super().__init__()
        self.formulas = {"x": x, "kernel": kernel, "grad": grad}

    def forms(self, role: str, x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        formula = self.formulas[role]
        wide = np.asarray(x).astype(np.float64)
        if formula is None:
            return wide, wide
        x = np.asarray(x)
        matrix = (x.astype(F32) if x.dtype == np.float64 else x).reshape(int(np.prod(x.shape[:axis])), -1)
        rowwise, columnwise = (formula(matrix, side).values().reshape(x.shape) for side in (False, True))
        return rowwise, columnwise
