"""Quantized arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jax_te.typing import Array, DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A low-precision array with its scale: ``value = data * scale_inv``.

    Args:
        data: FP8 values in the shape of the array they stand for.
        scale_inv: fp32 ``[]``, the reciprocal of the scale.
        dtype: dtype of the array before quantization, and of what `dequantize` gives.

    >>> q = QuantizedTensor(data=jnp.ones((2, 2), jnp.float8_e4m3fn), scale_inv=jnp.float32(0.5), dtype=jnp.float32)
    >>> float(q.dequantize()[0, 0])
    0.5
    """

    data: Array
    scale_inv: Array
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the array it stands for."""
        return self.data.ndim

    def dequantize(self) -> Array:
        """The values in ``dtype``: multiplied in fp32, rounded once."""
        return (self.data.astype(jnp.float32) * self.scale_inv).astype(self.dtype)


Operand = Array | QuantizedTensor
"""What a GEMM takes: an array, or its quantized form."""
