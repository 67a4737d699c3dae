"""Scale arithmetic, quantized arrays, quantizers and the state of delayed scaling."""

from jax_te.quantize.block import BlockQuantizer, MXQuantizer
from jax_te.quantize.gemm_quantizers import ROLES, GemmQuantizers, GemmState, TensorRole, quantizer_for
from jax_te.quantize.hadamard import hadamard_matrix, hadamard_rows
from jax_te.quantize.kernel import PackedOperand, QuantizedKernel
from jax_te.quantize.nvfp4 import NVFP4Quantizer
from jax_te.quantize.observe import STATISTICS, Observer, observe_quantization, quantization_statistics
from jax_te.quantize.quantizer import Quantizer, TensorQuantizer, quantize, quantize_operand, with_scale
from jax_te.quantize.scaling import AmaxState, amax, compute_scale, next_amax_state, power_of_two_scale, scale_in_use
from jax_te.quantize.state import (
    QuantizerState,
    as_float32,
    init_gemm_state,
    merge_quantizers,
    quantizer_variable,
    with_max_gradients,
    write_back,
)
from jax_te.quantize.tensor import Operand, QuantizedOperand, QuantizedTensor

__all__ = [
    "ROLES",
    "STATISTICS",
    "AmaxState",
    "BlockQuantizer",
    "GemmQuantizers",
    "GemmState",
    "MXQuantizer",
    "NVFP4Quantizer",
    "Observer",
    "Operand",
    "PackedOperand",
    "QuantizedKernel",
    "QuantizedOperand",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerState",
    "TensorQuantizer",
    "TensorRole",
    "amax",
    "as_float32",
    "compute_scale",
    "hadamard_matrix",
    "hadamard_rows",
    "init_gemm_state",
    "merge_quantizers",
    "next_amax_state",
    "observe_quantization",
    "power_of_two_scale",
    "quantization_statistics",
    "quantize",
    "quantize_operand",
    "quantizer_for",
    "quantizer_variable",
    "scale_in_use",
    "with_max_gradients",
    "with_scale",
    "write_back",
]
