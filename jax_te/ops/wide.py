"""The dtype in which ops compute where their input's would lose digits."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.typing import DTypeLike


def wide_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype of the arithmetic on arrays of ``dtype``: fp64 of fp64, else fp32.

    >>> wide_dtype(jnp.bfloat16).__name__
    'float32'
    """
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
