"""The ``xla`` backend: plain JAX with real float8 arrays. It runs, with the same numbers, on every device."""

from jax_te.ops.xla.activation import act, act_backward, act_backward_quantize, act_quantize
from jax_te.ops.xla.attention import attention, attention_supports
from jax_te.ops.xla.attention_block import attention_backward, attention_forward
from jax_te.ops.xla.gemm import (
    all_gather_kernel,
    all_gather_operand,
    gemm_dgrad,
    gemm_fprop,
    gemm_wgrad,
    quantize_dbias,
    quantize_operand,
    residual_for_dgrad,
    residual_for_wgrad,
    statistics,
    sum_rows,
)
from jax_te.ops.xla.norm import norm, norm_backward, norm_quantize

NAME = "xla"

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
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize_dbias",
    "quantize_operand",
    "residual_for_dgrad",
    "residual_for_wgrad",
    "statistics",
    "sum_rows",
]
