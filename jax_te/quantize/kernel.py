"""Kernels that are quantized ahead of the calls that use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jax_te.quantize.quantizer import Quantizer
from jax_te.sharding.internal import RankTree
from jax_te.typing import Array, DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedOperand:
    """A backend's operand as its arrays: some backends' own classes do not bear the placeholders of ``jax.tree``."""

    leaves: tuple[Any, ...]
    treedef: Any = field(metadata={"static": True})

    @staticmethod
    def of(operand: Any) -> PackedOperand:
        """The packed form of an operand."""
        leaves, treedef = jax.tree.flatten(operand)
        return PackedOperand(leaves=tuple(leaves), treedef=treedef)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedKernel:
    """A kernel ``[k, *n]`` in the form that the GEMMs read.

    It is what a weight cache holds from one microbatch to the next, and what a parameter is under ``fp8_param``.

    Args:
        form: a `QuantizedOperand`, as in a parameter, or a backend's own operand, packed; on a mesh each device's own.
        quantizer: what it was quantized with.
        amax: fp32 ``[]``, of the kernel it was made from; None where the recipe takes none.
        shape: of the kernel.
        dtype: of the kernel before quantization.
    """

    form: Any
    amax: Any
    quantizer: Quantizer = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def operand(self) -> Any:
        """What the backend's GEMMs take."""
        return jax.tree.unflatten(self.form.treedef, self.form.leaves) if self.is_packed else self.form

    @property
    def is_packed(self) -> bool:
        """Whether it is in a backend's own form."""
        return isinstance(self.form, PackedOperand | RankTree)

    def dequantize(self) -> Array:
        """The values in ``dtype``, of a kernel in plain arrays.

        Raises:
            TypeError: for one in a backend's own form.
        """
        if self.is_packed:
            raise TypeError("this kernel is in its backend's own form; quantize it with portable=True to dequantize it")
        return self.form.rowwise.dequantize()
