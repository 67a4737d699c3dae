"""Low-precision number formats, and their assignment to tensors."""

from __future__ import annotations

import enum
import functools

import ml_dtypes
import numpy as np

from jax_te.typing import DTypeLike

# Largest finite values; e4m3fn has no infinity, and uses its codes for numbers.
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0


class Format(enum.Enum):
    """Formats of the forward tensors (input, kernel) and of the gradients.

    - ``E4M3``: float8_e4m3fn everywhere, largest value 448.
    - ``E5M2``: float8_e5m2 everywhere, largest value 57344. FP8 GEMM units do not multiply two E5M2 operands,
      so no recipe accepts it for training; it names the gradients' half of ``HYBRID``.
    - ``HYBRID``: E4M3 forward, E5M2 for gradients.
    - ``E2M1``: float4_e2m1fn everywhere, largest value 6; for FP4 recipes only.

    Source: ``transformer_engine.common.recipe.Format``.

    >>> Format.HYBRID.bwd_dtype.__name__
    'float8_e5m2'
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"
    E2M1 = "e2m1"

    @property
    def fwd_dtype(self) -> DTypeLike:
        """dtype of quantized inputs and kernels."""
        return _FORWARD[self]

    @property
    def bwd_dtype(self) -> DTypeLike:
        """dtype of quantized output gradients."""
        return ml_dtypes.float8_e5m2 if self is Format.HYBRID else _FORWARD[self]


_FORWARD = {  # not jax.numpy's names of the same dtypes: formats import without jax
    Format.E4M3: ml_dtypes.float8_e4m3fn,
    Format.E5M2: ml_dtypes.float8_e5m2,
    Format.HYBRID: ml_dtypes.float8_e4m3fn,
    Format.E2M1: ml_dtypes.float4_e2m1fn,
}


_LARGEST = {"float8_e4m3fn": E4M3_MAX, "float8_e5m2": E5M2_MAX}


# Cached, because every quantization of an operand needs it.
@functools.cache
def fp8_max(dtype: DTypeLike) -> float:
    """Return the largest finite value of an FP8 dtype: 448 for E4M3, 57344 for E5M2.

    >>> fp8_max(jnp.float8_e4m3fn)
    448.0
    """
    name = np.dtype(dtype).name
    if name not in _LARGEST:
        raise TypeError(f"fp8_max takes float8_e4m3fn or float8_e5m2, got {name}")
    return _LARGEST[name]
