"""FP8 matrix product with one scale for each block of 128 values: wgmma over 128 of k, then scaled into fp32 sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

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
    """Sizes of the tiles of a product: a thread block computes ``[64 * pieces * warpgroups, 128]`` at a time.

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


class _Product(NamedTuple):
    """A product ``[m, n]`` over ``k``, ``k`` and ``n`` multiples of 128, and how it is cut into tiles.

    Args:
        m, n, k: its sizes.
        square: whether ``b`` has one scale for 128x128.
        out_dtype: dtype of the product.
    """

    m: int
    n: int
    k: int
    square: bool
    out_dtype: jnp.dtype[Any]

    @property
    def tiling(self) -> BlockTiles:
        return SQUARE if self.square else ALONG_K

    @property
    def steps(self) -> int:
        """Blocks of ``k``, of which each step multiplies one."""
        return self.k // BLOCK

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along ``m``, and pairs of tiles along ``n``."""
        return -(-self.m // self.tiling.rows), -(-self.n // (BLOCK * _PAIR))

    @property
    def width(self) -> int:
        """Columns that leave together: 128 bytes."""
        return 128 // self.out_dtype.itemsize


class _Ring(NamedTuple):
    """Buffers of operands in shared memory, one for each of ``stages``, and the barriers that pass them on.

    Args:
        a, a_scales, b, b_scales: operands and scales of a step.
        filled: barriers at which a step's operands have arrived.
        emptied: barriers at which all that multiply, in both thread blocks of a pair, have read them.
    """

    a: Any
    a_scales: Any
    b: Any
    b_scales: Any
    filled: Any
    emptied: Any


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
    scales into a ring of ``stages``, across tiles without a pause; the others multiply. Rows past ``m`` and columns
    past ``n`` read as zeros and are not written.
    """
    check_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    product = _Product(a.shape[0], b.shape[0], a.shape[1], square, jnp.dtype(out_dtype))
    t = product.tiling

    def kernel(*refs: Any) -> None:
        *operands, out, buffers, staged, filled, emptied = refs
        a_ring, a_scale_ring, b_ring, b_scale_ring = buffers
        ring = _Ring(a_ring, a_scale_ring, b_ring, b_scale_ring, filled, emptied)
        loads = lax.axis_index("warpgroup") == t.warpgroups

        @pl.when(loads)
        def _loading() -> None:
            _load(product, operands[:4], ring)

        @pl.when(jnp.logical_not(loads))
        def _multiplying() -> None:
            _multiply(product, operands[4] if bias is not None else None, out, ring, staged)

    def swizzled(columns: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)  # type: ignore

    buffers = (
        plgpu.SMEM((t.stages, t.rows, BLOCK), a.dtype, transforms=swizzled(BLOCK)),
        plgpu.SMEM((t.stages, t.rows), jnp.float32),
        plgpu.SMEM((t.stages, BLOCK, BLOCK), b.dtype, transforms=swizzled(BLOCK)),
        plgpu.SMEM((t.stages, BLOCK), jnp.float32),
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((product.m, product.n), out_dtype),
        scratch_types=[
            buffers,
            plgpu.SMEM((t.warpgroups, _PIECE, product.width), out_dtype, transforms=swizzled(product.width)),
            plgpu.Barrier(num_arrivals=len(buffers), num_barriers=t.stages),
            plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=t.warpgroups, num_barriers=t.stages),
        ],
        grid=(min(multiprocessors() // _PAIR, prod(product.grid)),),
        grid_names=("sm",),
        cluster=(_PAIR,),
        cluster_names=("pair",),
        num_threads=t.warpgroups + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(a, a_scales, b, b_scales, *(() if bias is None else (bias,)))


def _for_each_tile(product: _Product, body: Callable[[Any, Any, Any], None]) -> None:
    """Run ``body(row, column, step)`` with a tile's first row and column, and the steps done before it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.nd_loop((prod(product.grid),), collective_axes="sm")
    def _tile(loop: Any) -> None:
        row, column = plgpu.planar_snake(loop.index[0], product.grid, 0, _SWATH)
        column = column * _PAIR + lax.axis_index("pair")
        body(row * product.tiling.rows, column * BLOCK, loop.local_index * product.steps)


def _slot(product: _Product, step: Any) -> Any:
    """Return the number of the ring's buffer that holds a step's operands."""
    return lax.rem(step, jnp.int32(product.tiling.stages))


def _load(product: _Product, operands: Sequence[Any], ring: _Ring) -> None:
    """Fill the ring with the operands and scales of each step of each tile.

    Args:
        product: the product.
        operands: ``a``, its scales, ``b`` and its scales in the GPU's memory.
        ring: the ring to fill.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t = product.tiling
    plgpu.set_max_registers(t.registers[1], action="decrease")

    def load_tile(row: Array, column: Array, first: Array) -> None:
        rows, columns = pl.ds(row, t.rows), pl.ds(column, BLOCK)

        @pl.loop(0, product.steps)
        def _step(step: Array) -> None:
            _load_step(product, operands, ring, rows, columns, first, step)

    _for_each_tile(product, load_tile)
    tiles, sm, sms = prod(product.grid), lax.axis_index("sm"), lax.axis_size("sm")
    done = product.steps * lax.div(tiles - sm + sms - 1, jnp.int32(sms))
    for slot in range(t.stages):  # a thread block may not end while its neighbour signals it

        @pl.when(done > slot)
        def _last(slot: int = slot) -> None:
            plgpu.barrier_wait(ring.emptied.at[slot])


def _load_step(
    product: _Product, operands: Sequence[Any], ring: _Ring, rows: Any, columns: Any, first: Any, step: Any
) -> None:
    """Begin to copy a step's operands and scales into a buffer of the ring, once that is empty.

    Args:
        product: the product.
        operands: ``a``, its scales, ``b`` and its scales in the GPU's memory.
        ring: the ring to fill.
        rows, columns: rows of ``a`` and of ``b`` that the tile needs.
        first: number of steps before the tile.
        step: number of the step in the tile.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    a, a_scales, b, b_scales = operands
    slot, block = _slot(product, first + step), pl.ds(step * BLOCK, BLOCK)

    @pl.when(first + step >= product.tiling.stages)
    def _wait() -> None:
        plgpu.barrier_wait(ring.emptied.at[slot])

    def copy(source: Any, buffers: Any, shared: str | None) -> None:
        plgpu.copy_gmem_to_smem(source, buffers.at[slot], ring.filled.at[slot], collective_axes=shared)

    # A pair has the same rows: each of the two reads half of them into both.
    copy(a.at[rows, block], ring.a, "pair")
    copy(a_scales.at[step, rows], ring.a_scales, "pair")
    copy(b.at[columns, block], ring.b, None)
    copy(b_scales.at[step, columns], ring.b_scales, None)


def _multiply(product: _Product, bias: Any, out: Any, ring: _Ring, staged: Any) -> None:
    """Multiply the operands in the ring, and write each tile.

    Args:
        product: the product.
        bias: ``[n]`` in the GPU's memory, or None.
        out: the product in the GPU's memory.
        ring: the ring to read.
        staged: shared memory from which a warpgroup's sums leave, for each of them.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, layout = product.tiling, plgpu.Layout.WGMMA
    plgpu.set_max_registers(t.registers[0], action="increase")
    warpgroup = lax.axis_index("warpgroup")
    staged = staged.at[warpgroup]

    def multiply_tile(row: Array, column: Array, first: Array) -> None:
        def add_step(step: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            return _add_step(product, ring, _slot(product, first + step), warpgroup, sums)

        zeros = plgpu.layout_cast(jnp.zeros((_PIECE, BLOCK), jnp.float32), layout)
        sums = lax.fori_loop(0, product.steps, add_step, (zeros,) * t.pieces)
        if bias is not None:
            sums = _plus_bias(product, bias, column, sums)
        for piece, values in enumerate(sums):
            _store(product, values, out, staged, (row, column), warpgroup, piece)

    _for_each_tile(product, multiply_tile)
    plgpu.wait_smem_to_gmem(0)


def _row_of(t: BlockTiles, warpgroup: Any, piece: int) -> Any:
    """Return the first row in its tile of a warpgroup's piece."""
    return (warpgroup * t.pieces + piece) * _PIECE


def _wide(vector: Array, axis: int) -> Array:
    """Return a vector along one axis of a piece, the same along the other."""
    return lax.broadcast_in_dim(vector, (_PIECE, BLOCK), (axis,))


def _add_step(product: _Product, ring: _Ring, slot: Any, warpgroup: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the sums of a warpgroup's pieces plus a step's products, scaled."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, layout = product.tiling, plgpu.Layout.WGMMA

    def rows_of(piece: int) -> Any:
        return pl.ds(_row_of(t, warpgroup, piece), _PIECE)

    plgpu.barrier_wait(ring.filled.at[slot])
    if product.square:
        b_scale = ring.b_scales[slot, 0]
    else:
        b_scale = plgpu.load(ring.b_scales.at[slot], layout=layout.reduce(0), optimized=False)
    new = []
    for piece in range(t.pieces):
        a_scale = plgpu.load(ring.a_scales.at[slot, rows_of(piece)], layout=layout.reduce(1), optimized=False)

        def multiply_piece(acc: Any, piece: int = piece) -> Array:
            plgpu.wgmma(acc, ring.a.at[slot, rows_of(piece)], ring.b.at[slot].transpose((1, 0)))
            return acc[...]

        block = pl.run_scoped(multiply_piece, plgpu.ACC((_PIECE, BLOCK), jnp.float32))  # type: ignore
        if piece == t.pieces - 1:
            plgpu.barrier_arrive(ring.emptied.at[slot])
        if product.square:
            a_scale = a_scale * b_scale
        else:
            block = block * _wide(b_scale, 1)
        new.append(sums[piece] + block * _wide(a_scale, 0))
    return tuple(new)


def _plus_bias(product: _Product, bias: Any, column: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the sums of a tile's pieces plus the bias of its columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # The last pair's second tile may lie past the columns, and is not written.
    columns = pl.ds(jnp.minimum(column, product.n - BLOCK), BLOCK)
    shift = _wide(plgpu.load(bias.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False), 1)
    return tuple(values + shift for values in sums)


def _store(
    product: _Product, values: Array, out: Any, staged: Any, corner: tuple[Any, Any], warpgroup: Any, piece: int
) -> None:
    """Write the sums of a piece, as many columns at a time as the staging memory holds.

    Args:
        product: the product.
        values: the sums ``[64, 128]``.
        out: the product in the GPU's memory.
        staged: the warpgroup's shared memory.
        corner: first row and column of the tile.
        warpgroup, piece: numbers of the warpgroup and of its piece of the tile.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row, column = corner
    for i in range(BLOCK // product.width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = values[:, i * product.width : (i + 1) * product.width].astype(product.out_dtype)
        plgpu.commit_smem()
        rows = pl.ds(row + _row_of(product.tiling, warpgroup, piece), _PIECE)
        plgpu.copy_smem_to_gmem(staged, out.at[rows, pl.ds(column + i * product.width, product.width)])
