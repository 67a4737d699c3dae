"""Everything a backend offers, for Transformer Engine."""

from jax_te.ops.te.activation import act, act_backward, act_backward_quantize, act_quantize, has_kernel
from jax_te.ops.te.attention import attention, attention_backward, attention_forward, attention_supports
from jax_te.ops.te.gemm import (
    all_gather_kernel,
    all_gather_operand,
    gemm_dgrad,
    gemm_fprop,
    gemm_wgrad,
    quantize_dbias,
    quantize_operand,
    residual_for_dgrad,
    residual_for_wgrad,
)
from jax_te.ops.te.norm import norm, norm_backward, norm_quantize
from jax_te.ops.te.quantizer import recipe_supports
from jax_te.ops.xla.gemm import statistics

NAME = "te"

__all__ = [
    "NAME",
    "act",
    "act_backward",
    "act_backward_quantize",
    "act_quantize",
    "all_gather_kernel",
    "all_gather_operand",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_supports",
    "gemm_dgrad",
    "gemm_fprop",
    "gemm_wgrad",
    "has_kernel",
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize_dbias",
    "quantize_operand",
    "recipe_supports",
    "residual_for_dgrad",
    "residual_for_wgrad",
    "statistics",
]
