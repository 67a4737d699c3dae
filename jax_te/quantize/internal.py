"""Names of `jax_te.quantize` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.quantize.block import BLOCK, MX_BLOCK
from jax_te.quantize.group_tiles import GroupTiles
from jax_te.quantize.hadamard import hadamard_rows
from jax_te.quantize.nvfp4 import rounding_key
from jax_te.quantize.observe import ambient_observer, current_observer, stacked_statistics
from jax_te.quantize.padding import pad_rows, padded_size, unpad_rows
from jax_te.quantize.precision import ROLES, Gemm, Precision, TensorRole, check_state, precision_of
from jax_te.quantize.quantizer import Quantization, quantize_operand, quantize_tiles
from jax_te.quantize.scaling import amax, compute_scale, next_amax_state, scale_in_use
from jax_te.quantize.state import (
    added_counts,
    as_float32_inside,
    count,
    counting_of,
    counts_are_next_values,
    counts_within_step,
    quantizer_variables,
    scales_are_frozen,
    with_counts,
    with_max_gradients_inside,
)
from jax_te.quantize.tensor import OpaqueTree, Operand, as_matrix, same_values

__all__ = [
    "BLOCK",
    "MX_BLOCK",
    "ROLES",
    "Gemm",
    "GroupTiles",
    "OpaqueTree",
    "Operand",
    "Precision",
    "Quantization",
    "TensorRole",
    "added_counts",
    "amax",
    "ambient_observer",
    "as_float32_inside",
    "as_matrix",
    "check_state",
    "compute_scale",
    "count",
    "counting_of",
    "counts_are_next_values",
    "counts_within_step",
    "current_observer",
    "hadamard_rows",
    "next_amax_state",
    "pad_rows",
    "padded_size",
    "precision_of",
    "quantize_operand",
    "quantize_tiles",
    "quantizer_variables",
    "rounding_key",
    "same_values",
    "scale_in_use",
    "scales_are_frozen",
    "stacked_statistics",
    "unpad_rows",
    "with_counts",
    "with_max_gradients_inside",
]
