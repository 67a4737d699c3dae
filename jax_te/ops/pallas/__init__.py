"""Pallas kernels for Hopper GPUs: block-scaled FP8, and products of rows sorted by group."""

from jax_te.ops.pallas.block_gemm import block_gemm
from jax_te.ops.pallas.block_quantize import block_quantize, block_quantize_2d
from jax_te.ops.pallas.grouped_gemm import GROUP_ALIGNMENT, BlockScales, grouped_gemm, grouped_gemm_over_rows
from jax_te.ops.pallas.operand import BlockOperand
from jax_te.ops.pallas.support import supported
from jax_te.ops.pallas.tilings import (
    TABLE,
    GemmTiling,
    GroupedShape,
    read_table,
    tile_candidates,
    tiling_for,
    variants,
    write_table,
)

__all__ = [
    "GROUP_ALIGNMENT",
    "TABLE",
    "BlockOperand",
    "BlockScales",
    "GemmTiling",
    "GroupedShape",
    "block_gemm",
    "block_quantize",
    "block_quantize_2d",
    "grouped_gemm",
    "grouped_gemm_over_rows",
    "read_table",
    "supported",
    "tile_candidates",
    "tiling_for",
    "variants",
    "write_table",
]
