"""Rows of a table by integer ids, with a gradient that sums in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.integers import as_int32
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.typing import Array, DTypeLike

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


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: DTypeLike


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
        sums = jnp.tensordot(is_row, g, ids.ndim, precision="highest", preferred_element_type=_accumulation(g))
    else:
        zeros = jnp.zeros(spec.shape, _accumulation(g))
        sums = zeros.at[ids].add(g.astype(zeros.dtype), mode="drop", wrap_negative_indices=False)
    return _Args(sums.astype(spec.dtype), None), None


def _accumulation(g: Array) -> DTypeLike:
    """Return the dtype of sums: fp32, or the gradient's if that is wider."""
    return g.dtype if g.dtype == jnp.float64 else jnp.float32


_look_up = sharded_vjp(_fwd, _bwd)
