"""Backward of an activation times a weight of each row, in one pass that writes the gradient over its input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.pallas.support import check_jax
from jax_te.typing import Array

_ROWS = 4
"""Rows of a tile."""

_COLUMNS = 256
"""The most columns of a tile."""


def columns_of(f: int) -> int:
    """Return the number of columns of a tile: the largest power of two that divides ``f``, at most 256.

    >>> columns_of(14336), columns_of(2880)
    (256, 64)
    """
    return min(f & -f, _COLUMNS)


def weighted_act_backward(
    dy: Array,
    x: Array,
    weights: Array,
    function: Callable[[Sequence[Array]], Array],
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return the gradients of ``x`` and ``weights`` from that of ``y = act(x) * weights[:, None]``.

    Both products are rounded to the dtype of ``x``, as two separate operations would round them. The gradient of ``x``
    takes the memory of ``x``, unless something else still reads that.

    Args:
        dy: ``[rows, f]``, the gradient of ``y``.
        x: fp32, bf16 or fp16 ``[rows, n_act, f]``; ``rows`` a multiple of 4.
        weights: fp32 ``[rows]``.
        function: elementwise function of the components of ``x``, in fp32.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``[rows, n_act, f]`` in the dtype of ``x``, and fp32 ``[rows]``, whose sums have a fixed order.

    Raises:
        ValueError: for shapes that do not fit.

    >>> x, dy = jnp.ones((8, 2, 64)), jnp.ones((8, 64))
    >>> if jax.__version_info__ >= (0, 11):
    ...     dx, dw = weighted_act_backward(dy, x, jnp.full(8, 3.0), lambda parts: parts[0] * parts[1], interpret=True)
    ...     assert (float(dx[0, 0, 0]), float(dw[0])) == (3.0, 64.0)
    """
    rows, _, f = x.shape
    if dy.shape != (rows, f) or weights.shape != (rows,) or rows % _ROWS:
        raise ValueError(
            f"dy [rows, f], x [rows, n_act, f] and weights [rows] must go together, rows a multiple of {_ROWS}, got "
            f"{dy.shape}, {x.shape} and {weights.shape}"
        )
    dx, parts = _backward(dy, x, weights, function, interpret)
    return dx, jnp.sum(parts, axis=0)


@functools.partial(jax.jit, static_argnames=("function", "interpret"))
def _backward(dy: Array, x: Array, weights: Array, function: Any, interpret: bool) -> tuple[Array, Array]:
    """Return the gradient of ``x``, and of the weights for each tile of columns, ``[f / columns, rows]``."""
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, count, f = x.shape
    columns, dtype = columns_of(f), x.dtype

    def kernel(dy_ref: Any, x_ref: Any, weights_ref: Any, dx_ref: Any, parts_ref: Any) -> None:
        dy = dy_ref[...].astype(jnp.float32)
        components = tuple(x_ref[:, i, :].astype(jnp.float32) for i in range(count))
        z, backward = jax.vjp(lambda *parts: function(parts), *components)
        parts_ref[...] = jnp.sum(dy * z.astype(dtype).astype(jnp.float32), axis=1)[None]
        dz = (dy * weights_ref[...][:, None]).astype(dtype).astype(jnp.float32)
        for i, part in enumerate(backward(dz)):
            dx_ref[:, i, :] = part.astype(dtype)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((f // columns, rows), jnp.float32),
        ),
        grid=(rows // _ROWS, f // columns),
        in_specs=[
            pl.BlockSpec((_ROWS, columns), lambda i, j: (i, j)),
            pl.BlockSpec((_ROWS, count, columns), lambda i, j: (i, 0, j)),
            pl.BlockSpec((_ROWS,), lambda i, j: (i,)),
        ],
        out_specs=(
            pl.BlockSpec((_ROWS, count, columns), lambda i, j: (i, 0, j)),
            pl.BlockSpec((1, _ROWS), lambda i, j: (j, i)),
        ),
        input_output_aliases={1: 0},
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
    )(dy, x, weights)
