"""Kernels that are quantized ahead of the calls that use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jax_te.quantize.quantizer import Quantizer
from jax_te.typing import Array, DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedKernel:
    """A kernel ``[k, *n]`` in the form that the GEMMs read.

    It is what a weight cache holds from one microbatch to the next, and what a parameter is under ``fp8_param``.

    Args:
        operand: the backend's operand; a `QuantizedOperand` in a parameter.
        quantizer: what it was quantized with.
        amax: fp32 ``[]``, of the kernel it was made from; None where the recipe takes none.
        shape: of the kernel.
        dtype: of the kernel before quantization.
    """

    operand: Any
    amax: Any
    quantizer: Quantizer = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dequantize(self) -> Array:
        """The values in ``dtype``."""
        form = self.operand.rowwise if self.operand.rowwise is not None else self.operand.columnwise
        return form.dequantize()
