"""Overflow of fp16 in what is quantized."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.typing import Array


def show_overflow(x: Array) -> Array:
    """Return ``x``, which is to be quantized, in fp16 with nan for inf.

    Quantization under a scale that is known before its tensor clips inf to a finite value; nan stays nan in every
    format and on every backend.
    """
    # For fp16, which overflows in ordinary runs, also where nothing looks at the amaxes. In bf16 and fp32 the amax
    # alone shows it (`jax_te.training.outcome`): a pass over each operand would cost what fused kernels save.
    return jnp.where(jnp.isinf(x), jnp.nan, x) if x.dtype == jnp.float16 else x
