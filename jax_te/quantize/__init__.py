"""Quantized arrays, quantizers, statistics of quantization errors, and the states of delayed scaling and of
counting."""

from jax_te.quantize.attention import (
    AttentionPrecision,
    AttentionState,
    AttentionTensor,
    attention_precision_of,
)
from jax_te.quantize.block import BLOCK, MX_BLOCK, BlockQuantizer, MXQuantizer
from jax_te.quantize.counting import (
    Counting,
    added_counts,
    count,
    counting_of,
    counts_within_step,
    has_counts,
    with_counts,
)
from jax_te.quantize.group_tiles import GroupTiles, sum_of_groups
from jax_te.quantize.guard import Guard
from jax_te.quantize.kernel import QuantizedKernel
from jax_te.quantize.nvfp4 import NVFP4Quantizer, rounding_key
from jax_te.quantize.observe import (
    STATISTICS,
    Observer,
    ambient_observer,
    observe_quantization,
    quantization_statistics,
    stacked_statistics,
)
from jax_te.quantize.padding import pad_rows, padded_size, unpad_rows
from jax_te.quantize.precision import (
    ROLES,
    Gemm,
    GemmState,
    Precision,
    TensorRole,
    check_state,
    precision_of,
    quantizer_for,
)
from jax_te.quantize.quantizer import (
    Quantization,
    Quantizer,
    TensorQuantizer,
    quantize,
    quantize_operand,
    quantize_tiles,
)
from jax_te.quantize.scaling import (
    AmaxRule,
    amax,
    amax_rule_of,
    attention_scales_are_current,
    current_attention_scales,
    exponent_scale,
    frozen_scales,
    max_or_nan,
    power_of_two_scale,
    scales_are_frozen,
)
from jax_te.quantize.state import (
    USES,
    QuantizerState,
    as_float32,
    as_float32_inside,
    check_gradients_merge,
    init_attention_state,
    init_gemm_state,
    is_amax_state,
    merge_quantizers,
    observed_finite_amaxes,
    quantizer_variables,
    with_max_gradients,
    with_max_gradients_inside,
    write_back,
)
from jax_te.quantize.tensor import OpaqueTree, Operand, QuantizedOperand, QuantizedTensor, as_matrix, same_values

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "STATISTICS",
    "AttentionState",
    "BlockQuantizer",
    "Counting",
    "GemmState",
    "MXQuantizer",
    "NVFP4Quantizer",
    "Observer",
    "QuantizedKernel",
    "QuantizedOperand",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerState",
    "TensorQuantizer",
    "as_float32",
    "frozen_scales",
    "init_attention_state",
    "init_gemm_state",
    "merge_quantizers",
    "observe_quantization",
    "quantization_statistics",
    "quantize",
    "quantizer_for",
    "with_max_gradients",
    "write_back",
]
