"""Quantizers: static descriptions of the conversion of one tensor into low-precision values and scales."""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jax_te._validation import check_float, checked, dtype_name
from jax_te.quantize.group_tiles import GroupTiles
from jax_te.quantize.scaling import amax, compute_scale, power_of_two_scale
from jax_te.quantize.tensor import QuantizedOperand, QuantizedTensor
from jax_te.recipe import AmaxScope, fp8_max
from jax_te.sharding import MeshAxes, reduce_max
from jax_te.typing import Array, DTypeLike


@dataclass(frozen=True, kw_only=True)
class Quantizer(abc.ABC):
    """Base of all quantizers: hashable data.

    Args:
        dtype: dtype of the values.
    """

    alignment: ClassVar[int] = 16
    """Sizes of matrices quantized for GEMMs must be multiples of this."""

    shard_multiple: ClassVar[int | None] = None
    """Multiple of the sizes of a tensor's shards with which quantizing shards, under the amax of the whole tensor,
    equals quantizing the tensor; None: a shard's values depend on more of the tensor."""

    directional: ClassVar[bool] = True
    """Whether the two GEMMs that read a tensor need it quantized differently."""

    dtype: DTypeLike

    @abc.abstractmethod
    @checked
    def quantize(
        self, x: Array, scale: Array | None, *, axis: int, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        """Quantize ``x``, see the function `quantize`."""

    def _check_scale(self, scale: Array | None) -> None:
        """Raise ValueError for a scale: those of this quantizer follow from the tensor."""
        if scale is not None:
            raise ValueError(
                f"{type(self).__name__} computes scales from the tensor, and takes none; leave scale out, or take "
                "TensorQuantizer(scaling='given')"
            )

    def quantize_tiles(
        self, x: Array, tiles: GroupTiles, scale: Array | None, *, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        """Quantize the rows of several groups, padded with zeros, each as `quantize` would its rows alone.

        Args:
            x: ``[tiles, t, *c]``.
            tiles: the group of each tile.
            scale: fp32 ``[e]``, where the quantizer's is given.
            columnwise: see `quantize`.

        Returns:
            The tensor of each tile, their arrays stacked along a first axis ``[tiles]``; and the amax of each group's
            rows (fp32 ``[e]``), where the quantizer takes one, else None.

        Raises:
            ValueError: if blocks of scales would reach beyond a tile, or a scale depends on more than its block.
        """
        if self.shard_multiple is None or x.shape[1] % self.shard_multiple:
            raise ValueError(
                f"{type(self).__name__} cannot quantize rows of several groups in tiles of {x.shape[1]}: it has "
                f"shard_multiple={self.shard_multiple}. A quantizer whose scales are those of blocks within a tile "
                "says how many rows these have by shard_multiple; another one overrides quantize_tiles"
            )
        return jax.vmap(lambda tile: self.quantize(tile, None, axis=1, columnwise=columnwise))(x)


def check_fp8(dtype: DTypeLike) -> None:
    """Raise TypeError for a quantizer's dtype that is not E4M3 or E5M2."""
    try:
        fp8_max(dtype)
    except Exception:  # NumPy's are of several types
        raise TypeError(f"dtype must be float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}") from None


@dataclass(frozen=True, kw_only=True)
class TensorQuantizer(Quantizer):
    """One scale for the whole tensor: ``clip(x * scale)`` in fp32, rounded to nearest even.

    A current scale is 1 where the amax is 0, and nan, with all values, where it is inf or nan. Under a given scale an
    inf becomes the largest value; its amax shows it.

    Args:
        dtype: float8_e4m3fn or float8_e5m2.
        scaling: ``"current"``: the scale is ``max(dtype) / amax(x)``; ``"given"``: it is an argument, as under delayed
            scaling, whose recipe computes it from earlier amaxes.
        power_of_two: whether current scales are rounded down to powers of two.
        amax_scope: scope of current scales on a mesh, see `jax_te.recipe.Float8CurrentScaling`.

    Source: ``transformer_engine.jax.quantize.DelayedScaleQuantizer``, ``CurrentScaleQuantizer``.

    >>> q, seen = quantize(jnp.array([[1.0, -2.0]]), TensorQuantizer(dtype=jnp.float8_e4m3fn))
    >>> float(q.data[0, 1]), float(seen)
    (-448.0, 2.0)
    """

    shard_multiple: ClassVar[int | None] = 1
    directional: ClassVar[bool] = False

    scaling: Literal["given", "current"] = "current"
    power_of_two: bool = False
    amax_scope: AmaxScope = "group"

    def __post_init__(self) -> None:
        check_fp8(self.dtype)
        # Not by annotations: on a mesh ops make quantizers at each call.
        allowed = {"scaling": ("given", "current"), "amax_scope": get_args(AmaxScope), "power_of_two": (True, False)}
        for name, values in allowed.items():
            value = getattr(self, name)
            if not isinstance(value, type(values[0])) or value not in values:
                error = TypeError if name == "power_of_two" else ValueError
                raise error(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}")

    def _check_scale(self, scale: Array | None) -> None:
        """Raise ValueError for a scale that ``scaling`` excludes, and for one that is not fp32 ``[]`` or ``[d]``."""
        if self.scaling == "current":
            super()._check_scale(scale)
        elif scale is None:
            raise ValueError("scaling='given' needs a scale; give one, or take TensorQuantizer(scaling='current')")
        elif scale.dtype != jnp.float32 or scale.ndim > 1:
            raise ValueError(
                f"scale must be float32 [], or [d] for d parts of the leading axis, got {scale.dtype}"
                f"{list(scale.shape)}"
            )

    @checked
    def scale_for(self, x_amax: Array, scale: Array | None) -> Array:
        """Return the scale to quantize with: ``scale`` if it is given, else from the tensor's amax."""
        self._check_scale(scale)
        if scale is not None:
            return scale
        return (power_of_two_scale if self.power_of_two else compute_scale)(x_amax, self.dtype)

    @checked
    def quantize(
        self, x: Array, scale: Array | None, *, axis: int, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        check_float("TensorQuantizer", x)
        self._check_scale(scale)
        if scale is not None and scale.ndim == 1:
            return self._quantize_parts(x, scale, axis)
        x_amax = amax(x)
        scale = self.scale_for(x_amax, scale)
        limit = fp8_max(self.dtype)
        # The product in fp32, so that values are rounded once; clipped, because a cast to FP8 does not saturate.
        data = jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(self.dtype)
        return QuantizedTensor(data=data, scale_inv=1.0 / scale, dtype=x.dtype), x_amax

    @checked
    def quantize_tiles(
        self, x: Array, tiles: GroupTiles, scale: Array | None, *, columnwise: bool
    ) -> tuple[QuantizedTensor, Array | None]:
        amaxes = tiles.amax(amax(x, axis=tuple(range(1, x.ndim))))
        scales = self.scale_for(amaxes, scale)[tiles.group]
        with_given = dataclasses.replace(self, scaling="given")
        quantized, _ = jax.vmap(lambda tile, scale: with_given.quantize(tile, scale, axis=1, columnwise=columnwise))(
            x, scales
        )
        return quantized, amaxes

    def _quantize_parts(self, x: Array, scale: Array, axis: int) -> tuple[QuantizedTensor, Array]:
        """Quantize each of ``d`` equal parts of the leading axis with its own scale, ``scale [d]``; amaxes ``[d]``."""
        if x.shape[0] % scale.shape[0]:
            raise ValueError(
                f"the leading axis of {x.shape} does not divide into the {scale.shape[0]} parts of the batch that the "
                "quantizer state was made for; use a mesh that splits the batch alike, or prepare_quantization"
            )
        limit, rows = fp8_max(self.dtype), (scale.shape[0], *(1,) * x.ndim)
        parts = x.reshape(scale.shape[0], -1, *x.shape[1:])
        amaxes = amax(parts, axis=tuple(range(1, parts.ndim)))
        data = jnp.clip(parts.astype(jnp.float32) * scale.reshape(rows), -limit, limit).astype(self.dtype)
        return QuantizedTensor(
            data=data.reshape(x.shape), scale_inv=1.0 / scale, dtype=x.dtype, axis=axis, parts=scale.shape[0]
        ), amaxes


class Quantization(NamedTuple):
    """How one tensor of a call is quantized, in the arguments of a backend's primitives.

    Args:
        quantizer: None: not at all.
        scale: fp32 ``[]``, where the quantizer's is given.
        amax_axes: mesh axes over which an amax of the array, one device's shard, is reduced. None: the array is
            not a shard.
    """

    quantizer: Quantizer | None = None
    scale: Array | None = None
    amax_axes: MeshAxes | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the tensor must exist before it is quantized, because the amax of its shard gives the scale."""
        quantizer = self.quantizer
        return self.amax_axes is not None and isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "current"

    def of_shard(self, x: Array) -> Quantization:
        """Return the quantization of the shard ``x`` that gives the shard of the quantized tensor.

        All shards are quantized this way, also those that share their scale with no other: backends distinguish given
        from current scales, and a GEMM takes operands of one kind.
        """
        quantizer = self.quantizer
        if not isinstance(quantizer, TensorQuantizer) or quantizer.scaling == "given":
            return self
        # With the amax of all shards that share it, the current scale is known, and is given.
        scale = quantizer.scale_for(reduce_max(amax(x), self.amax_axes or ()), None)
        return Quantization(dataclasses.replace(quantizer, scaling="given"), scale)


def column_axis(x: Array, axis: int) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        ValueError: for an array that has no such axis, or no elements.
    """
    if not -x.ndim <= axis < x.ndim or x.size == 0:
        raise ValueError(f"axis {axis} must be one of x, which has elements, got shape {x.shape}")
    return axis % x.ndim


@checked
def quantize(
    x: Array, quantizer: Quantizer, scale: Array | None = None, *, axis: int = -1, columnwise: bool = False
) -> tuple[QuantizedTensor, Array | None]:
    """Return an array quantized for one GEMM, and its amax.

    Args:
        x: fp32, bf16 or fp16 ``[...]``, seen as the matrix ``[R, C]`` whose columns are the axes from ``axis`` on.
        quantizer: quantizer of the tensor.
        scale: fp32 ``[]``, where the quantizer's is given, or ``[d]``, a scale for each of ``d`` equal parts of the
            leading axis.
        axis: axis where the columns begin.
        columnwise: whether it is for a GEMM that sums over the rows of the matrix, not over its columns. Blocks lie
            along the axis that is summed over.

    Returns:
        The quantized tensor, and the amax of ``x`` (fp32 ``[]``) where the quantizer takes one of the whole tensor,
        else None.

    Raises:
        TypeError: for an array of another dtype.
        ValueError: for a scale where the quantizer computes it, none where it is given, and one of another shape or
            dtype; for an ``axis`` that ``x`` lacks.

    >>> from jax_te.quantize import BlockQuantizer
    >>> quantize(jnp.ones((4, 256)), BlockQuantizer(dtype=jnp.float8_e4m3fn))[0].scale_inv.shape
    (4, 2)
    """
    return quantizer.quantize(x, scale, axis=column_axis(x, axis), columnwise=columnwise)


def quantize_operand(
    x: Array, quantizer: Quantizer, scale: Array | None = None, *, axis: int = -1
) -> tuple[QuantizedOperand, Array | None]:
    """Return an array quantized for both GEMMs that read it, and its amax; see `quantize`."""
    axis = axis % x.ndim
    rowwise, x_amax = quantizer.quantize(x, scale, axis=axis, columnwise=False)
    # Without blocks, or with square ones, both GEMMs read the same values, which the backend transposes if it must.
    if not quantizer.directional:
        return QuantizedOperand(rowwise=rowwise, columnwise=None), x_amax
    columnwise, _ = quantizer.quantize(x, scale, axis=axis, columnwise=True)
    return QuantizedOperand(rowwise=rowwise, columnwise=columnwise), x_amax


def quantize_tiles(
    x: Array, quantizer: Quantizer, tiles: GroupTiles, scale: Array | None = None
) -> tuple[QuantizedOperand, Array | None]:
    """Return the rows of several groups quantized for both GEMMs that read them, see `Quantizer.quantize_tiles`."""
    rowwise, amaxes = quantizer.quantize_tiles(x, tiles, scale, columnwise=False)
    if not quantizer.directional:
        return QuantizedOperand(rowwise=rowwise, columnwise=None), amaxes
    columnwise, _ = quantizer.quantize_tiles(x, tiles, scale, columnwise=True)
    return QuantizedOperand(rowwise=rowwise, columnwise=columnwise), amaxes
