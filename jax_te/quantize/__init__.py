"""Quantized arrays, quantizers, statistics of what they lose, and the state of delayed scaling."""

from jax_te.quantize.block import BlockQuantizer, MXQuantizer
from jax_te.quantize.kernel import QuantizedKernel
from jax_te.quantize.nvfp4 import NVFP4Quantizer
from jax_te.quantize.observe import STATISTICS, Observer, observe_quantization, quantization_statistics
from jax_te.quantize.precision import GemmState, quantizer_for
from jax_te.quantize.quantizer import Quantizer, TensorQuantizer, quantize
from jax_te.quantize.state import (
    QuantizerState,
    as_float32,
    frozen_scales,
    init_gemm_state,
    merge_quantizers,
    with_max_gradients,
    write_back,
)
from jax_te.quantize.tensor import QuantizedOperand, QuantizedTensor

__all__ = [
    "STATISTICS",
    "BlockQuantizer",
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
    "init_gemm_state",
    "merge_quantizers",
    "observe_quantization",
    "quantization_statistics",
    "quantize",
    "quantizer_for",
    "with_max_gradients",
    "write_back",
]
