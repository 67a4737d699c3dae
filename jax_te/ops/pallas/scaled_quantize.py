"""FP8 quantization by given scales: each tile is read once, and written both plain and transposed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_te.ops.pallas.support import BLOCK, check_jax
from jax_te.recipe import fp8_max
from jax_te.typing import Array, DTypeLike

_HIGH = (jnp.float32, jnp.bfloat16, jnp.float16)


def scaled_quantize(x: Array, scale: Array, dtype: DTypeLike, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """Return ``x * scale``, clipped and rounded to nearest even, its transpose, and the amaxes of ``x``.

    Args:
        x: fp32, bf16 or fp16 ``[e, m, k]``, ``e`` matrices whose sizes are multiples of 128.
        scale: fp32 ``[e, m / 128]``, one for each 128 rows.
        dtype: float8_e4m3fn or float8_e5m2.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        rows: ``dtype [e, m, k]``.
        columns: ``dtype [e, k, m]``.
        amax: fp32 ``[e, m / 128]``, of each 128 rows of ``x``; nan wins.

    Raises:
        TypeError: for another dtype of ``x``.
        ValueError: for shapes that do not fit.

    >>> if jax.__version_info__ >= (0, 11):
    ...     rows, columns, amax = scaled_quantize(
    ...         jnp.full((1, 128, 256), 3.0), jnp.full((1, 1), 2.0), jnp.float8_e4m3fn, interpret=True
    ...     )
    ...     assert (float(rows[0, 0, 0]), columns.shape, amax.tolist()) == (6.0, (1, 256, 128), [[3.0]])
    """
    if x.dtype not in _HIGH:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype.name}")
    if x.ndim != 3 or x.shape[1] % BLOCK or x.shape[2] % BLOCK or not x.size:
        raise ValueError(f"x must be [e, m, k], m and k multiples of {BLOCK}, got shape {x.shape}; pad it")
    if scale.shape != (x.shape[0], x.shape[1] // BLOCK) or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale must be float32 {(x.shape[0], x.shape[1] // BLOCK)}, one for each {BLOCK} rows of x {x.shape}, "
            f"got {scale.dtype.name} {scale.shape}"
        )
    rows, columns, amaxes = _quantize(x, scale, jnp.dtype(dtype), interpret)
    return rows, columns, jnp.max(amaxes, axis=-1)


# Under a jit of its own: all layers whose shapes agree share one lowering.
@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def _quantize(x: Array, scale: Array, dtype: DTypeLike, interpret: bool) -> tuple[Array, Array, Array]:
    """Both forms, and the amax of each tile. One thread block a tile, whose two warpgroups write one form each."""
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    limit, (e, m, k) = fp8_max(dtype), x.shape
    blocks = m // BLOCK

    def load(tile: Any, start: Any, size: int) -> Array:
        part = tile.at[pl.ds(start, size)]
        return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)

    def write(tile: Any, scale: Array, out: Any) -> None:
        @pl.loop(0, BLOCK, step=BLOCK // 2)  # by halves, to spare registers
        def _half(start: Array) -> None:
            scaled = load(tile, start, BLOCK // 2) * scale
            out[pl.ds(start, BLOCK // 2)] = jnp.clip(scaled, -limit, limit).astype(dtype)

    def amax_of(tile: Any) -> Array:
        """Return the largest magnitude; nan if there is one, which a GPU's maximum ignores."""

        def add_half(half: Any, seen: tuple[Array, Array]) -> tuple[Array, Array]:
            values = jnp.abs(load(tile, half * (BLOCK // 2), BLOCK // 2))
            numbers = jnp.where(values == values, values, 0.0)
            nans = jnp.where(values == values, 0.0, 1.0)
            largest, some = (jnp.max(jnp.max(part, axis=1)) for part in (numbers, nans))
            return jnp.maximum(seen[0], largest), jnp.maximum(seen[1], some)

        largest, some_nan = lax.fori_loop(0, 2, add_half, (jnp.float32(0), jnp.float32(0)))
        return jnp.where(some_nan > 0, jnp.float32(jnp.nan), largest)

    def kernel(x, scale, rows, columns, amaxes, tile, out, arrived):
        row, column, side = lax.axis_index("row"), lax.axis_index("column"), lax.axis_index("side")
        matrix, block = lax.div(row, jnp.int32(blocks)), lax.rem(row, jnp.int32(blocks))
        here, there = pl.ds(block * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)

        @pl.when(side == 0)
        def _load() -> None:
            plgpu.copy_gmem_to_smem(x.at[matrix, here, there], tile, arrived)

        plgpu.barrier_wait(arrived)
        own_scale = scale[matrix, block]

        @pl.when(side == 0)
        def _rows() -> None:
            write(tile, own_scale, out.at[0])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[0], rows.at[matrix, here, there])
            amaxes[matrix, block, column] = amax_of(tile)

        @pl.when(side == 1)
        def _columns() -> None:
            write(tile.transpose((1, 0)), own_scale, out.at[1])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[1], columns.at[matrix, there, here])

        plgpu.wait_smem_to_gmem(0)

    def swizzled(itemsize: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)  # type: ignore

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((e, m, k), dtype),
            jax.ShapeDtypeStruct((e, k, m), dtype),
            jax.ShapeDtypeStruct((e, blocks, k // BLOCK), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((BLOCK, BLOCK), x.dtype, transforms=swizzled(x.dtype.itemsize)),
            plgpu.SMEM((2, BLOCK, BLOCK), dtype, transforms=swizzled(1)),
            plgpu.Barrier(),
        ],
        grid=(e * blocks, k // BLOCK),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="side",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, scale)
