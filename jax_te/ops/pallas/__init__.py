"""Pallas kernels for Hopper GPUs: FP8 with one scale for each block of 128 or 128x128 values."""

from jax_te.ops.pallas.block_gemm import block_gemm
from jax_te.ops.pallas.block_quantize import block_quantize, block_quantize_2d
from jax_te.ops.pallas.operand import BlockOperand
from jax_te.ops.pallas.support import supported

__all__ = ["BlockOperand", "block_gemm", "block_quantize", "block_quantize_2d", "supported"]
