"""Quantized arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jax_te._validation import check_axes, checked
from jax_te.quantize.hadamard import hadamard_rows
from jax_te.typing import Array, DTypeLike

_NEAR = 2.0**-20
"""Relative tolerance in fp32 at the boundary between two quantized values, see `QuantizedTensor.represents`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A low-precision array with its scales: ``value = data * scale_inv * tensor_scale_inv``.

    Blocks lie in the matrix view of the array, ``[R, C]``: the axes before ``axis`` are its rows, the others its
    columns.

    Args:
        data: FP8 or FP4 values in the shape of the array they stand for.
        scale_inv: reciprocal scales: fp32 ``[]`` for the whole tensor, or ``[ceil(R / r), ceil(C / c)]`` for blocks of
            ``r`` rows and ``c`` columns, in fp32, E8M0 or E4M3.
        tensor_scale_inv: fp32 ``[]``, the second level of NVFP4's scales, else None.
        dtype: dtype of the array before quantization, and of `dequantize`'s result.
        block: ``(r, c)``, or None for one scale.
        axis: the first axis that belongs to the columns.
        parts: equal parts of the leading axis that have a scale each, ``scale_inv [parts]``; 0: no such parts.
        rotated: whether a Hadamard transform along the rows' axis (`hadamard_rows`) preceded quantization.

    >>> q = QuantizedTensor(data=jnp.ones((2, 2), jnp.float8_e4m3fn), scale_inv=jnp.float32(0.5), dtype=jnp.float32)
    >>> float(q.dequantize()[0, 0])
    0.5
    """

    # Any: jax.tree fills the fields with shapes, shardings and placeholders as well.
    data: Any
    scale_inv: Any
    tensor_scale_inv: Any = None
    dtype: DTypeLike = field(metadata={"static": True})
    block: tuple[int, int] | None = field(default=None, metadata={"static": True})
    axis: int = field(default=1, metadata={"static": True})
    parts: int = field(default=0, metadata={"static": True})
    rotated: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it represents."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the array it stands for."""
        return self.data.ndim

    def values(self) -> Array:
        """Return ``data`` times its scales, fp32, in the shape of the data; rotated if the tensor is."""
        # Without the barrier XLA drops the cast to FP8 and back as a pair, and nothing is quantized.
        wide = jax.lax.optimization_barrier(self.data).astype(jnp.float32)
        if self.parts:
            rows = wide.reshape(self.parts, -1)
            return (rows * self.scale_inv[:, None]).reshape(self.shape)
        if self.block is None:
            return wide * self.scale_inv
        matrix = as_matrix(wide, self.axis)
        scales = expand_blocks(self.scale_inv.astype(jnp.float32), self.block, matrix.shape)
        if self.tensor_scale_inv is not None:
            # The two scales are multiplied first, as the quantizer did: the other order rounds differently.
            scales = scales * self.tensor_scale_inv
        return (matrix * scales).reshape(self.shape)

    def dequantize(self) -> Array:
        """Return the values in ``dtype``: multiplied in fp32, rotated back if the tensor is rotated, rounded once."""
        values = self.values()
        if self.rotated:
            values = hadamard_rows(as_matrix(values, self.axis), inverse=True).reshape(self.shape)
        return values.astype(self.dtype)

    @checked
    def represents(self, x: Array) -> Array:
        """Return a bool mask of where ``x``, fp32 in the shape of the data, rounds to these values under these scales.

        One that lies between two values within fp32's rounding of a scale counts as rounding to either, since the
        reciprocal of a stored scale need not be the scale that the values were made with.
        """
        inverse = self.scale_inv.astype(jnp.float32)
        if self.tensor_scale_inv is not None:
            inverse = inverse * self.tensor_scale_inv
        scale = jnp.minimum(1.0 / inverse, jnp.finfo(jnp.float32).max)
        if self.block is not None:
            matrix_shape = as_matrix(self.data, self.axis).shape
            scale = expand_blocks(scale, self.block, matrix_shape).reshape(self.shape)
        largest = float(jnp.finfo(self.data.dtype).max)
        below, above = (
            # A cast to FP8 does not saturate.
            same_values(self.data, jnp.clip(x * scale * (1.0 + near), -largest, largest).astype(self.data.dtype))
            for near in (-_NEAR, _NEAR)
        )
        return below | above


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedOperand:
    """A tensor quantized for the GEMMs that read it.

    Args:
        rowwise: tensor for GEMMs that sum over its columns: blocks lie along the rows. None if no GEMM needs it.
        columnwise: tensor for GEMMs that sum over its rows. None if no GEMM needs it, or if ``rowwise`` serves both.
    """

    rowwise: Any
    columnwise: Any

    @property
    def ndim(self) -> int:
        """Number of axes of the array it stands for."""
        form = self.rowwise if self.rowwise is not None else self.columnwise
        assert form is not None
        return form.ndim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OpaqueTree:
    """The arrays of a tree whose classes must not pass through JAX's transformations.

    Args:
        leaves: the arrays; with ``per_device`` each has a leading dimension with one entry for each device.
        treedef: structure of the tree.
        per_device: whether every device of a mesh has a tree of its own, which no other device reads.
    """

    leaves: tuple[Any, ...]
    treedef: Any = field(metadata={"static": True})
    per_device: bool = field(default=False, metadata={"static": True})

    @staticmethod
    def pack(tree: Any, *, per_device: bool = False) -> OpaqueTree:
        """Return ``tree`` as its arrays; ``per_device`` inside of ``shard_map``: this device's entry."""
        leaves, treedef = jax.tree.flatten(tree)
        if per_device:
            # shard_map concatenates results along an axis they have: scalars and replicated arrays need a new one.
            leaves = [jnp.expand_dims(leaf, axis=0) for leaf in leaves]
        return OpaqueTree(leaves=tuple(leaves), treedef=treedef, per_device=per_device)

    def unpack(self) -> Any:
        """Return the tree; of a ``per_device`` one, inside of ``shard_map``, this device's."""
        leaves = [leaf[0] for leaf in self.leaves] if self.per_device else self.leaves
        return jax.tree.unflatten(self.treedef, leaves)


Operand = Any
"""A GEMM's operand: an array, a `QuantizedOperand`, or a backend's own form of it."""


def same_values(x: Array, y: Array) -> Array:
    """Return where two arrays of one float dtype are equal, nan to nan and 0 to -0: bool.

    >>> same_values(jnp.array([jnp.nan, 0.0, 1.0]), jnp.array([jnp.nan, -0.0, 2.0])).tolist()
    [True, True, False]
    """
    # Compared as bit patterns: XLA may compare 16 or fewer bits as fp32, and drop the preceding cast, so that unrounded
    # values would be compared.
    word = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    ours, theirs = (jax.lax.bitcast_convert_type(each, word) for each in (x, y))
    magnitudes = (ours | theirs) & (jnp.iinfo(word).max >> 1)
    return (ours == theirs) | (magnitudes == 0) | (jnp.isnan(x) & jnp.isnan(y))


def as_matrix(x: Array, axis: int) -> Array:
    """Return ``x`` as ``[R, C]``, ``R`` the product of the axes before ``axis``.

    >>> as_matrix(jnp.ones((2, 3, 4)), -1).shape
    (6, 4)
    """
    check_axes("x", x)
    axis = axis % x.ndim
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def expand_blocks(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Return each block's scale at each of its elements: ``[ceil(R / r), ceil(C / c)]`` -> ``[R, C]``.

    >>> expand_blocks(jnp.array([[1.0, 2.0]]), (1, 2), (1, 3)).tolist()
    [[1.0, 1.0, 2.0]]
    """
    for axis, (size, whole) in enumerate(zip(block, shape, strict=True)):
        if size > 1:
            # The last block may be smaller than the others, so the repeated scales may reach beyond the matrix.
            scales = jax.lax.slice_in_dim(jnp.repeat(scales, size, axis=axis), 0, whole, axis=axis)
    return scales
