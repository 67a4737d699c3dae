"""GEMMs of several linear layers of one shape, each on its own rows, in plain JAX: a variant of backend ``xla``.

Its other primitives are those of ``xla``, which treat each row by itself.

Rows lie in tiles of one group each. A tile is quantized with its group's scales and multiplied by its group's kernel by
the primitives of one layer, so each group gets the same numbers as a separate layer. A loop of static length iterates
over the tiles: no shape depends on the sizes of groups, the host waits for nothing, and the only surplus work is the
padding of the groups' last tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.wide import wide_dtype
from jax_te.ops.xla import gemm
from jax_te.quantize import (
    GroupTiles,
    Quantization,
    Quantizer,
    amax,
    quantize_tiles,
    stacked_statistics,
    sum_of_groups,
)
from jax_te.quantize import quantize_operand as quantize_both
from jax_te.sharding import reduce_max
from jax_te.typing import Array, DTypeLike

NAME: str = "xla"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows of several groups, in tiles of one group each: ``x [tiles, t, *c]``; rows of no group are zeros."""

    x: Any
    tiles: GroupTiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedOperand:
    """`GroupedRows` as the GEMMs read them.

    Args:
        form: the operand of each tile, their arrays stacked along a first axis ``[tiles]``.
        group: the group of each tile ``[tiles]``, in fp32: operands of deferred kernel gradients are cotangents, among
            which JAX has no integers.
        count: number of groups.
    """

    form: Any
    group: Any
    count: int = field(metadata={"static": True})


def quantize_operand(x: GroupedRows | Array, how: Quantization, *, axis: int) -> tuple[Any, Array | None]:
    """Return rows of groups, or a kernel of each group ``[e, k, *n]``, as an operand, and the groups' amaxes ``[e]``.

    Args:
        x: the rows or kernels.
        how: quantizer; its scale, if any, is fp32 ``[e]``.
        axis: axis 1, where the columns of a tile and of one kernel begin.
    """
    quantizer, scale, _ = how = with_shared_scale(x, how)
    if not isinstance(x, GroupedRows):
        return (x, None) if quantizer is None else _quantize_each(x, quantizer, scale)
    form, amaxes = (x.x, None) if quantizer is None else _quantize_rows(x, quantizer, scale)
    return GroupedOperand(form=form, group=x.tiles.group.astype(jnp.float32), count=x.tiles.count), amaxes


def with_shared_scale(x: GroupedRows | Array, how: Quantization) -> Quantization:
    """Return the quantization of the shards ``x``, whose groups share their scales with those of other devices."""
    if not how.needs_amax or not how.amax_axes:
        return how
    quantizer: Any = how.quantizer
    rows = x.x if isinstance(x, GroupedRows) else x
    amaxes = amax(rows, axis=tuple(range(1, rows.ndim)))
    amaxes = x.tiles.amax(amaxes) if isinstance(x, GroupedRows) else amaxes
    scale = quantizer.scale_for(reduce_max(amaxes, how.amax_axes), None)
    # As `Quantization.of_shard`: the current scale is known, and is given.
    return Quantization(dataclasses.replace(quantizer, scaling="given"), scale)


def _quantize_rows(rows: GroupedRows, quantizer: Quantizer, scale: Array | None) -> tuple[Any, Any]:
    """Return the operand of each tile, stacked, and the groups' amaxes ``[e]``."""
    if rows.tiles.count == rows.x.shape[0] == 1:
        return _quantize_each(rows.x, quantizer, scale)
    return quantize_tiles(rows.x, quantizer, rows.tiles, scale)


def _quantize_each(x: Array, quantizer: Quantizer, scale: Array | None) -> tuple[Any, Any]:
    """Return matrices ``[e, k, *n]``, each quantized by itself, as an operand of stacked arrays, and amaxes ``[e]``."""

    def one(x: Array, scale: Array | None) -> tuple[Any, Array | None]:
        return quantize_both(x, quantizer, scale, axis=1)

    if x.shape[0] == 1:
        # Not by vmap, with which XLA may order the sums of the subsequent GEMM differently.
        return jax.tree.map(lambda leaf: leaf[None], one(*_only((x, scale))))
    return jax.vmap(one)(x, scale)


def statistics(x: GroupedRows | Array, how: Quantization, *, axis: int) -> dict[str, Array]:
    """Return statistics of the quantization of rows of groups or their kernels, together as of one tensor."""
    quantizer, scale, _ = how
    assert quantizer is not None
    if isinstance(x, GroupedRows):
        rows, tiles = x.x, x.tiles
        q = _quantize_rows(x, quantizer, scale)[0].rowwise
        amaxes = tiles.amax(amax(rows, axis=tuple(range(1, rows.ndim))))
        elements: Any = jnp.maximum(jnp.sum(tiles.rows), 1).astype(jnp.float32) * prod(rows.shape[2:])
    else:
        rows, q, elements = x, _quantize_each(x, quantizer, scale)[0].rowwise, x.size
        amaxes = amax(rows, axis=tuple(range(1, rows.ndim)))
    return {**stacked_statistics(rows, q, elements), "group_amaxes": amaxes}


def residual_for_wgrad(x: GroupedOperand) -> GroupedOperand:
    """Return the forms of the rows that the GEMM of the kernels' gradients reads."""
    return GroupedOperand(form=gemm.residual_for_wgrad(x.form), group=x.group, count=x.count)


residual_for_dgrad = gemm.residual_for_dgrad
all_gather_kernel = gemm.all_gather_kernel


def gemm_fprop(x: GroupedOperand, kernel: Any, bias: Array | None, split_accumulator: bool) -> Array:
    """Return ``x [rows, k] @ kernel [e, k, *n]`` of each row's group, ``[rows, *n]`` in the dtype of ``x``."""
    assert bias is None  # the op adds it, except to padding rows
    if _is_elementwise(x, kernel, 1):
        of_tiles = jnp.take(kernel.astype(x.form.dtype), x.group.astype(jnp.int32), axis=0)
        y = _beside(x.form, of_tiles) * of_tiles
        return y.reshape(-1, *y.shape[2:])
    return _by_tiles(lambda tile, kernel: gemm.gemm_fprop(tile, kernel, None, split_accumulator), x, kernel)


def gemm_dgrad(g: GroupedOperand, kernel: Any, split_accumulator: bool) -> Array:
    """Return ``g [rows, *n] @ kernel [e, k, *n]^T`` of each row's group, ``[rows, k]`` in the dtype of ``g``."""
    if _is_elementwise(g, kernel, 1):
        of_tiles = jnp.take(kernel.astype(g.form.dtype), g.group.astype(jnp.int32), axis=0)
        dtype = wide_dtype(g.form.dtype)
        products = g.form.astype(dtype) * of_tiles.astype(dtype)
        dx = jnp.sum(products, axis=tuple(range(2, g.form.ndim)))
        return dx.reshape(-1, 1).astype(g.form.dtype)
    return _by_tiles(lambda tile, kernel: gemm.gemm_dgrad(tile, kernel, split_accumulator), g, kernel)


def gemm_wgrad(x: GroupedOperand, g: GroupedOperand, dtype: DTypeLike, split_accumulator: bool) -> Array:
    """Return ``x^T @ g`` of each group's rows, ``[e, k, *n]``, accumulated in fp32 (of fp64: fp64), in ``dtype``."""
    if _is_one_gemm(x):
        only_x, only_g = _only((x.form, g.form))
        return gemm.gemm_wgrad(only_x, only_g, dtype, split_accumulator)[None]
    wide = _wide_dtype(x.form, g.form)
    if _is_elementwise(g, x.form, 2):
        products = _beside(x.form, g.form).astype(wide) * g.form.astype(wide)
        return sum_of_groups(jnp.sum(products, axis=1), x.group, x.count)[:, None].astype(dtype)

    def product(tile: tuple[Any, Any]) -> Array:
        return gemm.gemm_wgrad(*tile, wide, split_accumulator)

    def add(sums: Array, tile: tuple[Any, Array]) -> tuple[Array, None]:
        operands, group = tile[0], tile[1].astype(jnp.int32)
        sum_ = _at(sums, group) + product(operands)
        return jax.lax.dynamic_update_index_in_dim(sums, sum_, group, 0), None

    first = jax.eval_shape(lambda operands: _at(operands, 0), (x.form, g.form))
    shape = jax.eval_shape(product, first).shape
    sums, _ = jax.lax.scan(add, jnp.zeros((x.count, *shape), wide), ((x.form, g.form), x.group))
    return sums.astype(dtype)


def _by_tiles(multiply: Callable[[Any, Any], Array], rows: GroupedOperand, kernels: Any) -> Array:
    """Return ``multiply(tile, kernel)`` of each tile and its group's kernel, as one array of rows."""
    if isinstance(rows.form, jax.Array) and isinstance(kernels, jax.Array):
        kernels = kernels.astype(rows.form.dtype)  # once, not for each tile
    if _is_one_gemm(rows):
        return multiply(_only(rows.form), _only(kernels))
    y = jax.lax.map(lambda tile: multiply(tile[0], _at(kernels, tile[1].astype(jnp.int32))), (rows.form, rows.group))
    return y.reshape(-1, *y.shape[2:])


def _wide_dtype(*forms: Any) -> DTypeLike:
    """Return the dtype in which products of operands are added up: fp64 of fp64 arrays, else fp32."""
    wide = [wide_dtype(form.dtype) for form in forms if isinstance(form, jax.Array)]
    return jnp.float64 if jnp.float64 in wide else jnp.float32


def _is_elementwise(rows: GroupedOperand, other: Any, axis: int) -> bool:
    """Return whether the product with ``other``, which has ``k`` along ``axis``, is elementwise, and needs no loop.

    So it is with one feature in high precision, as of biases and the probabilities of rows.
    """
    arrays = isinstance(rows.form, jax.Array) and isinstance(other, jax.Array)
    return arrays and other.shape[axis] == 1 and not _is_one_gemm(rows)


def _beside(x: Array, other: Array) -> Array:
    """Return ``x [tiles, t, 1]`` with as many axes as ``other [tiles, ..., *n]``."""
    return x.reshape(*x.shape[:2], *(1,) * (other.ndim - 2))


def _is_one_gemm(rows: GroupedOperand) -> bool:
    """Return whether there is one group in one tile, whose GEMM is then bitwise that of one layer."""
    return rows.count == 1 and rows.group.shape == (1,)


def _only(operand: Any) -> Any:
    """Return the only operand of a stack of one."""
    return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), operand)


def _at(operand: Any, index: int | Array) -> Any:
    """Return one of several operands whose arrays are stacked."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), operand)
