"""FP8 matrix product with one scale for each block of 128 values: wgmma over 128 of k, then scaled into fp32 sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_te.ops.pallas.support import BLOCK, check_fp8_matrix, check_jax, multiprocessors, pad
from jax_te.typing import Array, DTypeLike

_PIECE = 64
"""Rows of one wgmma."""

_PAIR = 2
"""Thread blocks of a cluster: side by side along ``n``, with one read of ``a`` between them."""

_SWATH = 8
"""Tiles along ``m`` whose columns are processed together, so that operands are found in the cache."""


@dataclass(frozen=True, kw_only=True)
class BlockTiles:
    """How the product is cut up: a thread block computes ``[64 * pieces * warpgroups, 128]`` at a time.

    Args:
        warpgroups: number of warpgroups that multiply; one more loads.
        pieces: number of pieces of 64 rows for each warpgroup.
        stages: blocks of k in shared memory.
        registers: number of registers of a multiplying thread, and of a loading one.
    """

    warpgroups: int
    pieces: int
    stages: int
    registers: tuple[int, int]

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return _PIECE * self.pieces * self.warpgroups


# The fastest of those measured on an H200, at 8192^3 about 1340 and 1070 TFLOP/s. Three warpgroups hide each other's
# scaling better than two; a scale for each column takes more registers than three have.
SQUARE = BlockTiles(warpgroups=3, pieces=1, stages=4, registers=(160, 32))
ALONG_K = BlockTiles(warpgroups=2, pieces=2, stages=4, registers=(240, 24))


def block_gemm(
    a: Array,
    a_scale_inv: Array,
    b: Array,
    b_scale_inv: Array,
    bias: Array | None = None,
    *,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    """Return ``(a * a_scale_inv) @ (b * b_scale_inv).T + bias``.

    Every 128 of ``k`` are summed in the tensor cores, and these sums are added in fp32.

    Both operands have ``k`` last, the one form of Hopper's FP8 instructions. Those keep about 14 bits of a sum: hence
    each block leaves them before it is scaled and added.

    Args:
        a: float8_e4m3fn or float8_e5m2 ``[m, k]``, sizes multiples of 16.
        a_scale_inv: fp32 ``[m, ceil(k / 128)]`` or, one scale for 128x128, ``[ceil(m / 128), ceil(k / 128)]``.
        b: float8_e4m3fn or float8_e5m2 ``[n, k]``, of either dtype whichever ``a`` has.
        b_scale_inv: inverse scale of ``b``, like ``a_scale_inv``; one scale for 128x128 is faster here.
        bias: ``[n]``, any float dtype.
        out_dtype: float32, bfloat16 or float16.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``out_dtype [m, n]``, rounded once from fp32.

    Source: DeepSeek-V3, section 3.3; Transformer Engine, ``Float8BlockScaling``.

    >>> a, b = (jnp.full(shape, 2.0, jnp.float8_e4m3fn) for shape in ((16, 128), (32, 128)))
    >>> scales = jnp.full((16, 1), 0.5), jnp.full((1, 1), 0.25)
    >>> if jax.__version_info__ >= (0, 11):
    ...     out = block_gemm(a, scales[0], b, scales[1], out_dtype=jnp.float32, interpret=True)
    ...     assert (out.shape, float(out[0, 0])) == ((16, 32), 64.0)
    """
    check_fp8_matrix("a", a)
    check_fp8_matrix("b", b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a [m, k] and b [n, k] must share k, got {a.shape} and {b.shape}")
    if bias is not None and bias.shape != b.shape[:1]:
        raise ValueError(f"bias must have shape {b.shape[:1]}, b's rows, got {bias.shape}")
    if jnp.dtype(out_dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {jnp.dtype(out_dtype).name}")
    n = b.shape[0]
    square = _is_square("b_scale_inv", b_scale_inv, b)
    a_scales = _along_k("a_scale_inv", a_scale_inv, a)
    b_scales = jnp.pad(_along_k("b_scale_inv", b_scale_inv, b), ((0, 0), (0, -n % BLOCK)))
    a, b = pad(a, 1, BLOCK), pad(b, BLOCK, BLOCK)
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), (0, -n % BLOCK))
    return _gemm(a, a_scales, b, b_scales, bias, jnp.dtype(out_dtype), square, interpret)[:, :n]


def _is_square(name: str, scale_inv: Array, x: Array) -> bool:
    """Return whether there is one scale for 128x128, from the shape, which is checked."""
    rows, blocks = x.shape[0], -(-x.shape[1] // BLOCK)
    allowed = (rows, blocks), (-(-rows // BLOCK), blocks)
    if scale_inv.shape not in allowed or scale_inv.dtype != jnp.float32:
        raise ValueError(
            f"{name} must be float32 of shape {allowed[0]} (1x128) or {allowed[1]} (128x128), "
            f"got {scale_inv.dtype.name} {scale_inv.shape}"
        )
    return scale_inv.shape == allowed[1]


def _along_k(name: str, scale_inv: Array, x: Array) -> Array:
    """Return a scale for each row, blocks first: ``[ceil(k / 128), rows]``, so that a tile's scales are contiguous."""
    if _is_square(name, scale_inv, x):
        scale_inv = jnp.repeat(scale_inv, BLOCK, 0)[: x.shape[0]]
    return scale_inv.T


# Under a jit of its own: all layers whose shapes agree share one lowering, which takes a second or two.
@functools.partial(jax.jit, static_argnames=("out_dtype", "square", "interpret"))
def _gemm(
    a: Array,
    a_scales: Array,
    b: Array,
    b_scales: Array,
    bias: Array | None,
    out_dtype: DTypeLike,
    square: bool,
    interpret: bool,
) -> Array:
    """Run the kernel. ``k`` and ``n`` are multiples of 128.

    As many thread blocks as the GPU has multiprocessors process the tiles. One warpgroup of each loads operands and
    scales into a ring of ``stages``, across tiles without a pause; the others multiply. ``filled`` and ``emptied`` are
    the ring's barriers. Rows past ``m`` and columns past ``n`` read as zeros and are not written.
    """
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, layout = SQUARE if square else ALONG_K, plgpu.Layout.WGMMA
    (m, k), n = a.shape, b.shape[0]
    steps = k // BLOCK
    tiles = pl.cdiv(m, t.rows), pl.cdiv(n, BLOCK * _PAIR)
    width = 128 // jnp.dtype(out_dtype).itemsize  # columns that leave together

    def for_each_tile(body: Any) -> None:
        """Run ``body(row, column, step)`` with the tile's first row and column, and the steps done before it."""

        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="sm")
        def _tile(loop: Any) -> None:
            row, column = plgpu.planar_snake(loop.index[0], tiles, 0, _SWATH)
            column = column * _PAIR + lax.axis_index("pair")
            body(row * t.rows, column * BLOCK, loop.local_index * steps)

    def slot_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(t.stages))

    def load(operands, ring, filled, emptied):
        a, a_scales, b, b_scales = operands[:4]
        plgpu.set_max_registers(t.registers[1], action="decrease")

        def load_tile(row: Array, column: Array, first: Array) -> None:
            rows, columns = pl.ds(row, t.rows), pl.ds(column, BLOCK)

            @pl.loop(0, steps)
            def _step(step: Array) -> None:
                slot, block = slot_of(first + step), pl.ds(step * BLOCK, BLOCK)

                @pl.when(first + step >= t.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(emptied.at[slot])

                sources = a.at[rows, block], a_scales.at[step, rows], b.at[columns, block], b_scales.at[step, columns]
                for source, target, shared in zip(sources, ring, ("pair", "pair", None, None), strict=True):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], filled.at[slot], collective_axes=shared)

        for_each_tile(load_tile)
        sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
        done = steps * lax.div(tiles[0] * tiles[1] - sm + sms - 1, jnp.int32(sms))
        for slot in range(t.stages):  # a thread block may not end while its neighbour signals it

            @pl.when(done > slot)
            def _last(slot: int = slot) -> None:
                plgpu.barrier_wait(emptied.at[slot])

    def multiply(bias, out, ring, staged, filled, emptied):
        plgpu.set_max_registers(t.registers[0], action="increase")
        warpgroup = lax.axis_index("warpgroup")
        staged = staged.at[warpgroup]
        a_ring, a_scale_ring, b_ring, b_scale_ring = ring

        def rows_of(piece: int) -> Any:
            return pl.ds((warpgroup * t.pieces + piece) * _PIECE, _PIECE)

        def wide(vector: Array, axis: int) -> Array:
            return lax.broadcast_in_dim(vector, (_PIECE, BLOCK), (axis,))

        def add_step(slot: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            plgpu.barrier_wait(filled.at[slot])
            if square:
                b_scale = b_scale_ring[slot, 0]
            else:
                b_scale = plgpu.load(b_scale_ring.at[slot], layout=layout.reduce(0), optimized=False)
            new = []
            for piece in range(t.pieces):
                a_scale = plgpu.load(a_scale_ring.at[slot, rows_of(piece)], layout=layout.reduce(1), optimized=False)

                def product(acc: Any, piece: int = piece) -> Array:
                    plgpu.wgmma(acc, a_ring.at[slot, rows_of(piece)], b_ring.at[slot].transpose((1, 0)))
                    return acc[...]

                block = pl.run_scoped(product, plgpu.ACC((_PIECE, BLOCK), jnp.float32))  # type: ignore
                if piece == t.pieces - 1:
                    plgpu.barrier_arrive(emptied.at[slot])
                if square:
                    a_scale = a_scale * b_scale
                else:
                    block = block * wide(b_scale, 1)
                new.append(sums[piece] + block * wide(a_scale, 0))
            return tuple(new)

        def store(piece: int, values: Array, row: Array, column: Array) -> None:
            for i in range(BLOCK // width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged[...] = values[:, i * width : (i + 1) * width].astype(out_dtype)
                plgpu.commit_smem()
                rows = pl.ds(row + (warpgroup * t.pieces + piece) * _PIECE, _PIECE)
                plgpu.copy_smem_to_gmem(staged, out.at[rows, pl.ds(column + i * width, width)])

        def multiply_tile(row: Array, column: Array, first: Array) -> None:
            zeros = plgpu.layout_cast(jnp.zeros((_PIECE, BLOCK), jnp.float32), layout)
            sums = lax.fori_loop(0, steps, lambda i, s: add_step(slot_of(first + i), s), (zeros,) * t.pieces)
            if bias is not None:
                columns = pl.ds(jnp.minimum(column, n - BLOCK), BLOCK)
                shift = wide(plgpu.load(bias.at[columns], layout=layout.reduce(0), optimized=False), 1)
                sums = tuple(values + shift for values in sums)
            for piece, values in enumerate(sums):
                store(piece, values, row, column)

        for_each_tile(multiply_tile)
        plgpu.wait_smem_to_gmem(0)

    def kernel(*refs: Any) -> None:
        *operands, out, ring, staged, filled, emptied = refs
        loads = lax.axis_index("warpgroup") == t.warpgroups

        @pl.when(loads)
        def _load() -> None:
            load(operands, ring, filled, emptied)

        @pl.when(jnp.logical_not(loads))
        def _multiply() -> None:
            multiply(operands[4] if bias is not None else None, out, ring, staged, filled, emptied)

    def swizzled(columns: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)  # type: ignore

    ring = (
        plgpu.SMEM((t.stages, t.rows, BLOCK), a.dtype, transforms=swizzled(BLOCK)),
        plgpu.SMEM((t.stages, t.rows), jnp.float32),
        plgpu.SMEM((t.stages, BLOCK, BLOCK), b.dtype, transforms=swizzled(BLOCK)),
        plgpu.SMEM((t.stages, BLOCK), jnp.float32),
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[
            ring,
            plgpu.SMEM((t.warpgroups, _PIECE, width), out_dtype, transforms=swizzled(width)),
            plgpu.Barrier(num_arrivals=len(ring), num_barriers=t.stages),
            plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=t.warpgroups, num_barriers=t.stages),
        ],
        grid=(min(multiprocessors() // _PAIR, tiles[0] * tiles[1]),),
        grid_names=("sm",),
        cluster=(_PAIR,),
        cluster_names=("pair",),
        num_threads=t.warpgroups + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(a, a_scales, b, b_scales, *(() if bias is None else (bias,)))
