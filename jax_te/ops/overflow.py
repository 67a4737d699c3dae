"""Overflow of fp16 in what is quantized."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.typing import Array


def show_overflow(x: Array) -> Array:
    """Return ``x``, which is to be quantized, in fp16 with nan for inf.

    Quantization clips inf to a finite value, and dynamic loss scaling would not see that a gradient has overflowed; nan
    stays nan in every format and on every backend.
    """
    # bf16 has the range of fp32: it overflows where fp32 does, and nothing scales its loss.
    return jnp.where(jnp.isinf(x), jnp.nan, x) if x.dtype == jnp.float16 else x
