"""Kernels that are quantized before the calls that use them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te._validation import checked
from jax_te.quantize.guard import Guard
from jax_te.quantize.quantizer import Quantizer, TensorQuantizer
from jax_te.quantize.tensor import OpaqueTree, QuantizedTensor
from jax_te.typing import Array, DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedKernel:
    """A kernel ``[k, *n]`` in the form that the GEMMs read.

    A layer caches its kernel so between microbatches, and a parameter is stored so under ``fp8_param``.

    ``jax.tree.map`` reaches the codes and scales of a parameter, and arithmetic on them means nothing. Where it changes
    a dtype (``0.5 * (a + b)``, a moving average) it raises a TypeError. Where it changes none (``a + b``, a cast back),
    the kernel's values are nan from then on.

    Args:
        form: a `QuantizedOperand`, as in a parameter, or an `OpaqueTree` of a backend's own operand, on a mesh one for
            each device. TE's tensor classes fail when JAX unflattens them with placeholder leaves.
        quantizer: the quantizer that made it.
        amax: fp32 ``[]``, of the kernel it was made from, or ``[e]`` of experts'; None where the recipe takes none.
        guard: constants by which arithmetic on a parameter is noticed; None in a cache.
        shape: shape of the kernel, or of the stack of all layers' kernels, also inside of the loop over the layers.
        dtype: dtype of the kernel before quantization.
    """

    form: Any
    amax: Any
    guard: Guard | None = None
    quantizer: Quantizer = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def is_opaque(self) -> bool:
        """Whether it is in a backend's own form."""
        return isinstance(self.form, OpaqueTree)

    @property
    def is_per_device(self) -> bool:
        """Whether each device of a mesh has quantized its own shard."""
        return isinstance(self.form, OpaqueTree) and self.form.per_device

    @property
    def operand(self) -> Any:
        """The operand that the backend's GEMMs take."""
        if isinstance(self.form, OpaqueTree):
            return self.form.unpack()
        return jax.tree.map(self._checked, self.form, is_leaf=lambda node: isinstance(node, QuantizedTensor))

    @property
    def lacks_shards(self) -> str | None:
        """Reason why devices of a mesh have no usable shard of it, or None."""
        if isinstance(self.form, OpaqueTree):
            return None if self.form.per_device else "its kernel was quantized as a whole, for one device"
        one_scale = isinstance(self.quantizer, TensorQuantizer)
        return None if one_scale else "its kernel was quantized in blocks as a whole"

    @checked
    def partition_specs(
        self, kernel: PartitionSpec, per_device: PartitionSpec, scales: PartitionSpec
    ) -> QuantizedKernel:
        """Return the PartitionSpecs of its arrays from those of the kernel, and of its scale or scales."""
        if isinstance(self.form, OpaqueTree):
            form: Any = per_device
        else:
            # Values are sharded like the kernel.
            form = jax.tree.map(lambda leaf: kernel if leaf.shape == self.shape else scales, self.form)
        amax, guard = jax.tree.map(lambda _: scales, (self.amax, self.guard))
        return replace(self, form=form, amax=amax, guard=guard)

    @checked
    def of_layer(self, ndim: int) -> QuantizedKernel:
        """Return it with the ``shape`` of one layer's kernel, of ``ndim`` axes, if a loop sliced it from a stack."""
        return self if self.ndim == ndim else replace(self, shape=self.shape[-ndim:])

    def dequantize(self) -> Array:
        """Return the values in ``dtype``, of a kernel in plain arrays.

        Raises:
            TypeError: for a kernel in a backend's own form.
        """
        if self.is_opaque:
            raise TypeError("this kernel is in its backend's own form; quantize it with portable=True to dequantize it")

        def of_layers(tensor: QuantizedTensor) -> Array:
            return jax.vmap(of_layers)(tensor) if _is_stacked(tensor) else tensor.dequantize()

        return of_layers(self._checked(self.form.rowwise))

    @checked
    def taken_over(self, exact: Array) -> Array:
        """Return the exact values, replaced by the kernel's values where they do not round to it.

        Args:
            exact: fp32, in the shape of the kernel, which is one in plain arrays.
        """

        def of_layers(tensor: QuantizedTensor, exact: Array) -> Array:
            if _is_stacked(tensor):
                return jax.vmap(of_layers)(tensor, exact)
            return jnp.where(tensor.represents(exact), exact, tensor.values())

        return of_layers(self._checked(self.form.rowwise), exact)

    def _checked(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Return one of its tensors, with nan as scale if arithmetic was done on its arrays."""
        if self.guard is None:
            return tensor
        name = "scale_inv" if tensor.tensor_scale_inv is None else "tensor_scale_inv"
        scale = getattr(tensor, name)
        blocks = 2 if name == "scale_inv" and tensor.block is not None else 0
        # A kernel has two or more axes after those of a stack.
        layers = min(scale.ndim - blocks, tensor.ndim - 2)
        intact = self.guard.intact(layers)
        return replace(tensor, **{name: jnp.where(intact[..., *(None,) * blocks], scale, jnp.nan)})


def _is_stacked(tensor: QuantizedTensor) -> bool:
    """Return whether a tensor has axes in front, of a stack of layers or of experts."""
    return tensor.scale_inv.ndim > (0 if tensor.block is None else 2)
