"""Rows of a table by integer ids, with a gradient that sums in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jax_te.ops.integers import as_int32
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.ops.wide import wide_dtype
from jax_te.sharding import MeshAxes, flat, mesh_dims, partition_spec, reduce_sum
from jax_te.typing import Array, DTypeLike, LogicalAxes

_FEW_ROWS = 1024
"""The most rows of a table whose gradient is a GEMM: on an H200 it takes no longer than a scatter."""


def look_up_rows(table: Array, ids: Array) -> Array:
    """Return ``table[ids]``, nan for an id outside of the table.

    The gradient adds the cotangents of each row in fp32 and is rounded once: bf16 sums of a frequent id would stop
    growing, and a GPU adds to one bf16 value at a time. For a table of few rows it is a GEMM, whose sums have a fixed
    order on every device.

    Args:
        table: ``[v, ...]``, of any float dtype.
        ids: integers ``[*n]`` in ``[0, v)``.

    Returns:
        ``[*n, ...]`` in the dtype of ``table``.

    >>> jax.grad(lambda table: look_up_rows(table, jnp.array([0, 2, 2])).sum())(jnp.zeros(3)).tolist()
    [1.0, 0.0, 2.0]
    """
    return _look_up(_Spec(table.shape, table.dtype), None, _Args(table, as_int32("ids", ids)))


def look_up_rows_on_devices(
    table: Array, ids: Array, axes: LogicalAxes, ids_axes: LogicalAxes, mesh: AbstractMesh
) -> Array:
    """Return `look_up_rows` of a table whose rows are split: each device's own rows, summed over devices.

    Args:
        table: ``[v, h]``.
        ids: integers ``[*n]`` in ``[0, v)``.
        axes: logical axes of the table; its second dimension is whole.
        ids_axes: logical axes of ``ids``.
        mesh: the mesh in use.
    """
    ids = as_int32("ids", ids)
    table_dims, ids_dims = mesh_dims(axes, mesh), mesh_dims(ids_axes, mesh)
    split = _Args(partition_spec(table_dims), partition_spec(ids_dims))
    shards = Shards(
        mesh=mesh, args=split, out=partition_spec((*ids_dims, ())), cotangents=_Args(split.table, None), sinks=None
    )
    return _look_up_own(_SplitSpec(table.dtype, flat(table_dims), flat(ids_dims)), shards, _Args(table, ids))


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: DTypeLike


class _SplitSpec(NamedTuple):
    dtype: DTypeLike
    over: MeshAxes  # that split the rows
    ids_over: MeshAxes  # that split the ids


class _Args(NamedTuple):
    table: Any
    ids: Any


def _fwd(spec: _Spec, args: _Args) -> tuple[Array, Array]:
    # JAX clamps or wraps ids outside of the table by default, which hides mistakes of a tokenizer.
    return args.table.at[args.ids].get(mode="fill", wrap_negative_indices=False), args.ids


def _bwd(spec: _Spec, ids: Array, g: Array) -> tuple[_Args, None]:
    rows = spec.shape[0]
    if rows <= _FEW_ROWS:
        is_row = jax.nn.one_hot(ids, rows, dtype=g.dtype, axis=0)
        # At less than the highest precision a GPU would round fp32 gradients to TF32 before it multiplies them by one.
        sums = jnp.tensordot(is_row, g, ids.ndim, precision="highest", preferred_element_type=wide_dtype(g.dtype))
    else:
        zeros = jnp.zeros(spec.shape, wide_dtype(g.dtype))
        sums = zeros.at[ids].add(g.astype(zeros.dtype), mode="drop", wrap_negative_indices=False)
    return _Args(sums.astype(spec.dtype), None), None


_look_up = sharded_vjp(_fwd, _bwd)


def _own_ids(spec: _SplitSpec, ids: Array, rows: int) -> Array:
    """Return ids of a device's own ``rows``; those of other devices' rows are outside of them."""
    return ids - jax.lax.axis_index(spec.over) * rows if spec.over else ids


def _own_fwd(spec: _SplitSpec, args: _Args) -> tuple[Array, tuple[Array, Array]]:
    rows = args.table.shape[0]
    own = _own_ids(spec, args.ids, rows)
    inside = (own >= 0) & (own < rows)
    found, _ = _fwd(_Spec(args.table.shape, spec.dtype), _Args(args.table, jnp.where(inside, own, 0)))
    found = jnp.where(inside[..., None], found, jnp.zeros((), found.dtype))
    # Only one summand is nonzero, so the sum is exact. An id outside of the whole table is in no shard.
    count = reduce_sum(inside.astype(jnp.int32), spec.over)
    found = jnp.where((count > 0)[..., None], reduce_sum(found, spec.over), jnp.asarray(jnp.nan, found.dtype))
    # Only its number of rows is read: a residual must be an array.
    return found, (args.ids, jnp.zeros((rows, 0), spec.dtype))


def _own_bwd(spec: _SplitSpec, residuals: tuple[Array, Array], g: Array) -> tuple[_Args, None]:
    ids, like = residuals
    rows = like.shape[0]
    wide = _Spec((rows, g.shape[-1]), wide_dtype(g.dtype))
    cotangents, _ = _bwd(wide, _own_ids(spec, ids, rows), g)
    return _Args(reduce_sum(cotangents.table, spec.ids_over).astype(spec.dtype), None), None


_look_up_own = sharded_vjp(_own_fwd, _own_bwd)
