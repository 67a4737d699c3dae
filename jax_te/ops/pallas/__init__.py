"""Pallas kernels for Hopper GPUs: block-scaled FP8, and products of rows sorted by group."""

from jax_te.ops.pallas.block_gemm import block_gemm
from jax_te.ops.pallas.block_quantize import block_quantize, block_quantize_2d
from jax_te.ops.pallas.grouped_gemm import grouped_gemm, grouped_gemm_over_rows
from jax_te.ops.pallas.operand import BlockOperand
from jax_te.ops.pallas.support import supported

__all__ = [
    "BlockOperand",
    "block_gemm",
    "block_quantize",
    "block_quantize_2d",
    "grouped_gemm",
    "grouped_gemm_over_rows",
    "supported",
]
