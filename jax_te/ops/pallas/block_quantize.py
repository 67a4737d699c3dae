"""FP8 quantization with one scale for each block: each tile is read once and written both plain and transposed."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_te.ops.pallas.support import BLOCK, check_float_matrix, check_jax, pad
from jax_te.quantize import exponent_scale
from jax_te.recipe import fp8_max
from jax_te.typing import Array, DTypeLike

_LARGEST = float(jnp.finfo(jnp.float32).max)


def block_quantize(
    x: Array, dtype: DTypeLike, *, power_of_two: bool = True, interpret: bool = False
) -> tuple[Array, Array, Array, Array]:
    """Quantize rows in blocks of 1x128 and columns in blocks of 128x1.

    A scale is ``max(dtype) / amax`` of its block, 1 where the amax is 0, nan where it is inf; data is ``x * scale`` in
    fp32, clipped and rounded to nearest even. A nan stays nan; which scale its block gets depends on the device.

    Args:
        x: fp32, bf16 or fp16 ``[m, k]``, sizes multiples of 16.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: whether to round scales down to powers of two. If False, a scale errs by up to 2 units in the last
            place on the GPU, whose division is not rounded exactly.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        rows: ``dtype [m, k]``.
        rows_scale_inv: fp32 ``[m, ceil(k / 128)]``, 1 / scale.
        columns: ``dtype [k, m]``, transposed.
        columns_scale_inv: fp32 ``[k, ceil(m / 128)]``.

    Source: Transformer Engine, ``Float8BlockScaling`` in one dimension; DeepSeek-V3, section 3.3.

    >>> x = jnp.full((128, 256), 7.0).at[0, 0].set(-448.0)
    >>> if jax.__version_info__ >= (0, 11):
    ...     rows, rows_scale_inv, columns, columns_scale_inv = block_quantize(x, jnp.float8_e4m3fn, interpret=True)
    ...     assert rows_scale_inv[:2].tolist() == [[1.0, 0.015625], [0.015625, 0.015625]]
    ...     assert (columns.shape, columns_scale_inv.shape) == ((256, 128), (256, 1))
    """
    check_float_matrix("x", x)
    m, k = x.shape
    # Zeros change no block's amax, so whole tiles can be quantized and cut afterwards.
    whole = pad(x, BLOCK, BLOCK)[None]
    rows, columns, rows_inv, columns_inv = (
        part[0] for part in _quantize(whole, jnp.dtype(dtype), power_of_two, False, interpret)
    )
    return rows[:m, :k], rows_inv.T[:m], columns[:k, :m], columns_inv.T[:k]


def block_quantize_2d(
    w: Array, dtype: DTypeLike, *, power_of_two: bool = True, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Quantize in blocks of 128x128; the transposed copy has the same values and (transposed) the same scales.

    Arguments and arithmetic are those of `block_quantize`.

    Args:
        w: fp32, bf16 or fp16 ``[k, n]``, sizes multiples of 16, or several such matrices ``[e, k, n]``.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: whether to round scales down to powers of two.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``dtype [k, n]``, its transpose ``[n, k]``, and 1 / scale, fp32 ``[ceil(k / 128), ceil(n / 128)]``; each with
        the leading axis of ``w``, if it has one.

    Source: Transformer Engine, ``Float8BlockScaling`` in two dimensions.

    >>> if jax.__version_info__ >= (0, 11):
    ...     w, transposed, scale_inv = block_quantize_2d(jnp.full((128, 256), 3.5), jnp.float8_e4m3fn, interpret=True)
    ...     assert (scale_inv.tolist(), float(w[0, 0])) == ([[0.0078125, 0.0078125]], 448.0)
    ...     assert transposed.shape == (256, 128)
    """
    several = w.ndim == 3
    check_float_matrix("w", w.reshape(-1, w.shape[-1]) if several else w)
    matrices = w if several else w[None]
    _, k, n = matrices.shape
    if k % 16:
        raise ValueError(f"the matrices of w must have sizes that are multiples of 16, got shape {w.shape}; pad them")
    whole = jnp.pad(matrices, ((0, 0), (0, -k % BLOCK), (0, -n % BLOCK))) if k % BLOCK or n % BLOCK else matrices
    data, transposed, scale_inv, _ = _quantize(whole, jnp.dtype(dtype), power_of_two, True, interpret)
    parts = data[:, :k, :n], transposed[:, :n, :k], scale_inv
    return parts if several else tuple(part[0] for part in parts)  # type: ignore[return-value]


def _scale(amax: Array, dtype: DTypeLike, power_of_two: bool) -> Array:
    """Return ``max(dtype) / amax``, at most the largest fp32; 1 where the amax is 0, nan where it is inf or nan."""
    scale = exponent_scale(amax, dtype) if power_of_two else jnp.minimum(fp8_max(dtype) / amax, _LARGEST)
    scale = jnp.where(amax > 0.0, scale, jnp.float32(1.0))
    return jnp.where(amax <= _LARGEST, scale, jnp.float32(jnp.nan))


class _Form(NamedTuple):
    """Form of a quantized tile.

    Args:
        dtype: FP8 dtype of the data.
        limit: its largest value.
        power_of_two: whether scales are powers of two.
        square: whether a tile has one scale, instead of one for each of its rows, and of its columns.
    """

    dtype: DTypeLike
    limit: float
    power_of_two: bool
    square: bool


class _Outputs(NamedTuple):
    """Memory to which one of the two warpgroups writes the tile, or its transpose, and the scale_inv."""

    data: Any
    scale_inv: Any


# Under a jit of its own: all layers whose shapes agree share one lowering, which takes a second or two.
@functools.partial(jax.jit, static_argnames=("dtype", "power_of_two", "square", "interpret"))
def _quantize(x: Array, dtype: DTypeLike, power_of_two: bool, square: bool, interpret: bool) -> tuple[Array, ...]:
    """Data ``[e, m, k]`` as it is and transposed, and their scale_inv, the blocked axis first, sizes multiples of 128.

    One thread block per tile, two warpgroups: one writes the tile, the other its transpose.
    """
    form = _Form(dtype, fp8_max(dtype), power_of_two, square)
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    e, m, k = x.shape
    blocks = m // BLOCK, k // BLOCK

    def kernel(x, rows, columns, rows_inv, columns_inv, tile, out, out_inv, shared, arrived, scaled):
        line, column, side = lax.axis_index("line"), lax.axis_index("column"), lax.axis_index("side")
        matrix, row = lax.div(line, jnp.int32(blocks[0])), lax.rem(line, jnp.int32(blocks[0]))
        here, there = pl.ds(row * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)

        @pl.when(side == 0)
        def _load() -> None:
            # Once for both warpgroups: the tile is read from memory a single time, which is what the kernel is for.
            plgpu.copy_gmem_to_smem(x.at[matrix, here, there], tile, arrived)

        plgpu.barrier_wait(arrived)

        @pl.when(side == 0)
        def _rows() -> None:
            staged = _Outputs(out.at[0], out_inv.at[0])
            _quantize_rows(form, tile, staged, shared, scaled)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.data, rows.at[matrix, here, there])
            if square:
                rows_inv[matrix, row, column] = out_inv[0, 0]
            else:
                plgpu.copy_smem_to_gmem(staged.scale_inv, rows_inv.at[matrix, column, here])

        @pl.when(side == 1)
        def _columns() -> None:
            staged = _Outputs(out.at[1], out_inv.at[1])
            _quantize_columns(form, tile, staged, shared, scaled)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.data, columns.at[matrix, there, here])
            plgpu.copy_smem_to_gmem(staged.scale_inv, columns_inv.at[matrix, row, there])

        plgpu.wait_smem_to_gmem(0)

    def swizzled(itemsize: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)  # type: ignore

    f32 = jnp.float32
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((e, m, k), dtype),
            jax.ShapeDtypeStruct((e, k, m), dtype),
            jax.ShapeDtypeStruct((e, *(blocks if square else (blocks[1], m))), f32),
            jax.ShapeDtypeStruct((e, blocks[0], k), f32),
        ),
        scratch_types=[
            plgpu.SMEM((BLOCK, BLOCK), x.dtype, transforms=swizzled(x.dtype.itemsize)),
            plgpu.SMEM((2, BLOCK, BLOCK), dtype, transforms=swizzled(1)),
            plgpu.SMEM((2, BLOCK), f32),
            plgpu.SMEM((BLOCK,), f32),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        grid=(e * blocks[0], blocks[1]),
        grid_names=("line", "column"),
        num_threads=2,
        thread_name="side",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x)


def _quantize_rows(form: _Form, tile: Any, staged: _Outputs, shared: Any, scaled: Any) -> None:
    """Quantize a tile; with one scale for the whole, hand it to the warpgroup of the transpose.

    Args:
        form: the form.
        tile: ``[128, 128]`` in shared memory.
        staged: shared memory for the results.
        shared: shared memory for the scale of the tile.
        scaled: barrier at which that scale is there.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not form.square:
        _quantize_by_row(form, tile, staged)
        return
    # One warpgroup takes the maximum of all: two would meet in the memory that Pallas reduces in.
    amax = jnp.max(jnp.max(jnp.abs(_load_lines(tile, 0, BLOCK)), axis=1))
    scale = _scale(lax.broadcast_in_dim(amax, (BLOCK,), ()), form.dtype, form.power_of_two)
    shared[...] = scale
    plgpu.commit_smem()
    plgpu.barrier_arrive(scaled)
    _write_lines(form, tile, 0, BLOCK, scale, staged)


def _quantize_columns(form: _Form, tile: Any, staged: _Outputs, shared: Any, scaled: Any) -> None:
    """Quantize the transpose of a tile, see `_quantize_rows`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    turned = tile.transpose((1, 0))
    if not form.square:
        _quantize_by_row(form, turned, staged)
        return
    plgpu.barrier_wait(scaled)
    scale = plgpu.load(shared, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    _write_lines(form, turned, 0, BLOCK, scale, staged)


def _quantize_by_row(form: _Form, tile: Any, staged: _Outputs) -> None:
    """Quantize with a scale for each row: by halves, to spare registers."""
    from jax.experimental import pallas as pl

    @pl.loop(0, BLOCK, step=BLOCK // 2)
    def _half(start: Array) -> None:
        amax = jnp.max(jnp.abs(_load_lines(tile, start, BLOCK // 2)), axis=1)
        _write_lines(form, tile, start, BLOCK // 2, _scale(amax, form.dtype, form.power_of_two), staged)


def _load_lines(tile: Any, start: Any, size: int) -> Array:
    """Return lines of a tile in registers, in fp32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    part = tile.at[pl.ds(start, size)]
    return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)


def _write_lines(form: _Form, tile: Any, start: Any, size: int, scale: Array, staged: _Outputs) -> None:
    """Write lines of a tile ``[128, 128]`` times their scales, and 1 / scale."""
    from jax.experimental import pallas as pl

    part = pl.ds(start, size)
    scaled = _load_lines(tile, start, size) * lax.broadcast_in_dim(scale, (size, BLOCK), (0,))
    staged.data[part] = jnp.clip(scaled, -form.limit, form.limit).astype(form.dtype)
    staged.scale_inv[part] = 1.0 / scale
