"""Everything a backend offers, for Transformer Engine."""

from jax_te.ops.te.activation import act, act_backward, act_backward_quantize, act_quantize
from jax_te.ops.te.attention import attention, attention_backward, attention_forward, attention_supports
from jax_te.ops.te.gemm import (
    gather_kernel,
    gather_rows,
    gemm_dgrad,
    gemm_fprop,
    gemm_wgrad,
    keep_kernel,
    keep_x,
    quantize_dbias,
    quantize_operand,
)
from jax_te.ops.te.norm import norm, norm_backward, norm_quantize
from jax_te.ops.te.quantizer import recipe_supports

NAME = "te"

__all__ = [
    "NAME",
    "act",
    "act_backward",
    "act_backward_quantize",
    "act_quantize",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_supports",
    "gather_kernel",
    "gather_rows",
    "gemm_dgrad",
    "gemm_fprop",
    "gemm_wgrad",
    "keep_kernel",
    "keep_x",
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize_dbias",
    "quantize_operand",
    "recipe_supports",
]
