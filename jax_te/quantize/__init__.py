"""Scale arithmetic, quantized arrays, quantizers and the state of delayed scaling."""

from jax_te.quantize.quantizer import ROLES, GemmQuantizers, GemmState, Quantizer, TensorRole, quantize
from jax_te.quantize.scaling import AmaxState, amax, compute_scale, next_amax_state, scale_in_use
from jax_te.quantize.state import (
    QuantizerState,
    init_gemm_state,
    merge_quantizers,
    prepare_quantization,
    quantizer_variable,
    split_model,
    write_back,
)
from jax_te.quantize.tensor import Operand, QuantizedTensor

__all__ = [
    "ROLES",
    "AmaxState",
    "GemmQuantizers",
    "GemmState",
    "Operand",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerState",
    "TensorRole",
    "amax",
    "compute_scale",
    "init_gemm_state",
    "merge_quantizers",
    "next_amax_state",
    "prepare_quantization",
    "quantize",
    "quantizer_variable",
    "scale_in_use",
    "split_model",
    "write_back",
]
