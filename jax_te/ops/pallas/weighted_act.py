"""Backward of an activation times a weight of each row, in one pass that writes the gradient over its input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import add_jaxvals_p

from jax_te.ops.pallas.support import check_jax, multiprocessors
from jax_te.typing import Array

ROWS, COLUMNS = 16, 64
"""Size of a piece of a tile: each of 128 threads has 16 bytes of it, and eight threads a row, one line of memory."""

_PIECES = 2
"""The most pieces of a tile, side by side."""

_BLOCKS = 4
"""Thread blocks of a multiprocessor, of one warpgroup each: some compute while others wait."""

_BYTES = 52 * 1024
"""The most shared memory of a thread block's buffers: four of them have 227 KiB, with what Pallas adds."""

_WRITTEN = 2
"""Buffers of tiles that are written to memory."""

_16_BIT = (jnp.bfloat16, jnp.float16)


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
        x: bf16 or fp16 ``[rows, n_act, f]``; ``rows`` a multiple of 16, ``f`` of 64.
        weights: fp32 ``[rows]``.
        function: elementwise function of the components of ``x``, in fp32. Mosaic GPU must have its operations and
            those of its derivative.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``[rows, n_act, f]`` in the dtype of ``x``, and fp32 ``[rows]``, whose sums have a fixed order.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for other dtypes.

    >>> x, dy = jnp.ones((32, 2, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    >>> if jax.__version_info__ >= (0, 11):
    ...     dx, dw = weighted_act_backward(dy, x, jnp.full(32, 3.0), lambda parts: parts[0] * parts[1], interpret=True)
    ...     assert (float(dx[0, 0, 0]), float(dw[0])) == (3.0, 64.0)
    """
    rows, _, f = x.shape
    if dy.shape != (rows, f) or weights.shape != (rows,) or rows % ROWS or f % COLUMNS:
        raise ValueError(
            f"dy [rows, f], x [rows, n_act, f] and weights [rows] must go together, rows a multiple of {ROWS} and f of "
            f"{COLUMNS}, got {dy.shape}, {x.shape} and {weights.shape}"
        )
    if x.dtype not in _16_BIT or dy.dtype != x.dtype or weights.dtype != jnp.float32:
        raise TypeError(
            f"dy and x must both be bfloat16 or both float16, and weights float32, got {dy.dtype.name}, {x.dtype.name} "
            f"and {weights.dtype.name}"
        )
    dx, sums = _backward(dy, x, weights, function, interpret)
    return dx, jnp.sum(sums, axis=0)


def _pieces_of(f: int) -> int:
    """The number of pieces of a tile: the largest that cuts ``f`` into whole tiles."""
    return next(pieces for pieces in range(_PIECES, 0, -1) if f % (pieces * COLUMNS) == 0)


def _flat(function: Callable[..., list[Array]], count: int, shape: tuple[int, ...]) -> Callable[..., list[Array]]:
    """Return a function of ``count`` fp32 arrays without what Mosaic GPU lacks: calls, and JAX's sum of cotangents."""

    def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def value(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for eqn in jaxpr.eqns:
            operands = [value(variable) for variable in eqn.invars]
            called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if called is not None:
                results = evaluate(called.jaxpr, called.consts, operands)
            elif eqn.primitive is add_jaxvals_p:
                results = [lax.add(*operands)]
            else:
                results = eqn.primitive.bind(*operands, **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(count)))
    return lambda *args: evaluate(traced.jaxpr, traced.consts, args)


@functools.partial(jax.jit, static_argnames=("function", "interpret"))
def _backward(dy: Array, x: Array, weights: Array, function: Any, interpret: bool) -> tuple[Array, Array]:
    """The gradient of ``x``, and of the weights for each tile of columns, ``[tiles, rows]``.

    As many thread blocks as the GPU runs at once take tiles in turn, so that at any time they read and write next to
    each other. Copies of tiles behind and before the one that is computed are under way meanwhile.
    """
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, count, f = x.shape
    pieces, dtype, f32 = _pieces_of(f), x.dtype, jnp.float32
    width = pieces * COLUMNS
    lines, tiles = rows // ROWS, f // width
    blocks = min(multiprocessors() * _BLOCKS, lines * tiles)
    component = ROWS * width * dtype.itemsize
    stages = max(2, (_BYTES - _WRITTEN * count * component) // ((1 + count) * component))

    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((ROWS, COLUMNS), (ROWS // 4, COLUMNS), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )

    def value_and_gradients(dz: Array, *components: Array) -> list[Array]:
        z, backward = jax.vjp(lambda *parts: function(parts), *components)
        return [z, *backward(dz)]

    differentiate = _flat(value_and_gradients, 1 + count, (ROWS, COLUMNS))

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout).astype(f32)

    def compute(dy: Any, x: Any, weights: Any, dx: Any, sums: Any) -> None:
        """Compute a tile, all of it in shared memory."""
        weight = plgpu.load(weights, layout=layout.reduce(1), optimized=False)
        weight = lax.broadcast_in_dim(weight, (ROWS, COLUMNS), (0,))
        terms = []
        for piece in range(pieces):
            columns = pl.ds(piece * COLUMNS, COLUMNS)
            dy_piece = load(dy.at[:, columns])
            dz = (dy_piece * weight).astype(dtype).astype(f32)
            z, *gradients = differentiate(dz, *(load(x.at[:, i, columns]) for i in range(count)))
            for i, part in enumerate(gradients):
                dx[:, i, columns] = part.astype(dtype)
            terms.append(dy_piece * z.astype(dtype).astype(f32))
        sums[...] = jnp.sum(functools.reduce(jnp.add, terms), axis=1)

    def kernel(dy: Any, x: Any, weights: Any, sums: Any, dx_written: Any, sums_written: Any) -> None:
        block = lax.axis_index("block")

        def place(step: Any) -> tuple[Any, Any]:
            """The line and column of a thread block's tile."""
            tile = step * blocks + block
            return lax.div(tile, jnp.int32(tiles)), lax.rem(tile, jnp.int32(tiles))

        def process(indices: tuple[Any], dy: Any, x_read: Any, weights: Any) -> None:
            (step,) = indices
            line, column = place(step)
            slot = lax.rem(step, jnp.int32(_WRITTEN))
            # This buffer's last copies must have read it; the two of each step since then may be in flight.
            plgpu.wait_smem_to_gmem(2 * (_WRITTEN - 1), wait_read_only=True)
            compute(dy, x_read, weights, dx_written.at[slot], sums_written.at[slot])
            plgpu.commit_smem()
            here = pl.ds(line * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(dx_written.at[slot], x.at[here, :, pl.ds(column * width, width)])
            plgpu.copy_smem_to_gmem(sums_written.at[slot], sums.at[column, here])

        plgpu.emit_pipeline(
            process,
            grid=(lax.div(lines * tiles - 1 - block, jnp.int32(blocks)) + 1,),
            in_specs=[
                plgpu.BlockSpec((ROWS, width), place),
                plgpu.BlockSpec((ROWS, count, width), lambda step: (place(step)[0], 0, place(step)[1])),
                plgpu.BlockSpec((ROWS,), lambda step: place(step)[:1]),
            ],
            max_concurrent_steps=stages,
        )(dy, x, weights)
        plgpu.wait_smem_to_gmem(0)

    # A reference, since kernels of Mosaic GPU take no aliases: the compiler lets it have the memory of x.
    dx = jax.new_ref(x)
    sums = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tiles, rows), f32),
        scratch_types=[
            plgpu.SMEM((_WRITTEN, ROWS, count, width), dtype),
            plgpu.SMEM((_WRITTEN, ROWS), f32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            # Threads read only what copies bring and write only what copies take, and both kinds of copies are issued
            # behind commit_smem's barrier: barriers at each store would only add to the wait.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # the threads of a row are in one warp
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(dy, dx, weights)
    return jax.freeze(dx), sums
