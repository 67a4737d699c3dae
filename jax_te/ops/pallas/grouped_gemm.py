"""Matrix products of rows sorted by group, each group with its own matrix: one kernel, nothing read by the host.

Both products cut their result into tiles, which as many thread blocks as the GPU has multiprocessors process. One
warpgroup of a thread block loads operands into a ring of buffers, across tiles without a pause; the others multiply. A
tile belongs to one group: it reads that group's matrix, or sums over that group's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_te.ops.pallas.support import check_jax, multiprocessors
from jax_te.ops.pallas.tilings import PIECE, STEP_BYTES, GemmTiling, GroupedShape, Scaling, tiling_for
from jax_te.typing import Array, DTypeLike

GROUP_ALIGNMENT = 128
"""Alignment of groups in rows, so that no step of a sum over rows, and no piece of a tile, spans two groups."""

_LINE = 128
"""The most values that a line of a tile has, and the multiple to which the scales of blocks are padded."""

_16_BIT = (jnp.bfloat16, jnp.float16)
_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class BlockScales(NamedTuple):
    """Inverse scales of FP8 operands, one for each block of 128 values along what is summed over, fp32.

    Args:
        a: ``[k / 128, rows]``: a scale for 128 values of a row. Over rows ``[rows / 128, m]``.
        b: ``[e, k / 128, n / 128]``: a scale for 128 x 128 values of a matrix. Over rows ``[rows / 128, n]``. Sizes
            that are not multiples of 128 are rounded up.
    """

    a: Array
    b: Array


def grouped_gemm(
    a: Array,
    b: Array,
    sizes: Array,
    scale: Array | BlockScales | None = None,
    *,
    b_transposed: bool = False,
    split_accumulator: bool = False,
    out_dtype: DTypeLike,
    tiling: GemmTiling | None = None,
    interpret: bool = False,
) -> Array:
    """Return ``(a[rows of g] @ b[g]) * scale[g]`` for each group ``g``, and zeros for the rows behind the last group.

    Args:
        a: bf16, fp16, float8_e4m3fn or float8_e5m2 ``[rows, k]``: one group's rows after another's. Operands whose
            sizes are not multiples of 64, in FP8 of 128, are copied.
        b: ``[e, k, n]``, or ``[e, n, k]`` if ``b_transposed``, which FP8 operands must be. FP8 operands may be of
            different dtypes, others share theirs.
        sizes: int32 ``[e]``, the number of rows of each group, multiples of 128 whose sum is at most ``rows``. Values
            on the device: a call with other sizes is the same program.
        scale: fp32 ``[e]``, the product of the inverse scales of FP8 operands; or `BlockScales` of both, with which
            every 128 of ``k`` leave the tensor cores, are scaled, and accumulated in fp32. None for 1.
        b_transposed: whether ``b`` has ``k`` last.
        split_accumulator: whether, for FP8 operands, every 128 of ``k`` leave the tensor cores, which keep about 14
            bits of a sum, and are accumulated in fp32. Others are summed in fp32 throughout.
        out_dtype: float32, bfloat16 or float16.
        tiling: sizes of the tiles, which change no number. None: those of `tiling_for`.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``out_dtype [rows, n]``, rounded once from fp32.

    Raises:
        ValueError: for shapes that do not fit, ``rows`` that are not a multiple of 128, and FP8 operands without
            ``b_transposed``.
        TypeError: for other dtypes.

    >>> if jax.__version_info__ >= (0, 11):
    ...     a, b = jnp.ones((384, 64), jnp.bfloat16), jnp.full((2, 64, 128), 2.0, jnp.bfloat16)
    ...     out = grouped_gemm(a, b, jnp.array([128, 128]), out_dtype=jnp.float32, interpret=True)
    ...     assert out[::128, 0].tolist() == [128.0, 128.0, 0.0]
    """
    _check_operands(a, b, out_dtype)
    rows, k = a.shape
    if b.ndim != 3 or b.shape[2 if b_transposed else 1] != k or sizes.shape != b.shape[:1]:
        wanted = "[e, n, k]" if b_transposed else "[e, k, n]"
        raise ValueError(
            f"a [rows, k], b {wanted} and sizes [e] do not go together: {a.shape}, {b.shape} and {sizes.shape}"
        )
    if rows % GROUP_ALIGNMENT:
        raise ValueError(f"the rows of a must be a multiple of {GROUP_ALIGNMENT}, got {rows}; pad them with zeros")
    if a.dtype in _FP8 and not b_transposed:
        raise ValueError("Hopper multiplies FP8 operands that have k last; give b as [e, n, k] with b_transposed=True")
    n = b.shape[1 if b_transposed else 2]
    scaling = _scaling(split_accumulator, scale)
    if isinstance(scale, BlockScales):
        blocks = -(-k // GROUP_ALIGNMENT)
        _check_block_scales(a, scale, (blocks, rows), (b.shape[0], blocks, -(-n // GROUP_ALIGNMENT)))
        # As a scale for each column, since copies into shared memory have at least 16 bytes.
        scale = BlockScales(scale.a, jnp.repeat(scale.b, GROUP_ALIGNMENT, axis=2))
    if tiling is None:
        bits, groups = 8 * a.dtype.itemsize, sizes.shape[0]
        tiling = tiling_for(GroupedShape(False, b_transposed, bits, scaling, groups=groups, rows=rows, k=k, n=n))
    form = _Form(tiling, jnp.dtype(out_dtype), over_rows=False, a_last=True, b_last=b_transposed, scaling=scaling)
    return _product(_padded(a, interpret), _padded(b, interpret), sizes, scale, form, interpret)[:, :n]


def grouped_gemm_over_rows(
    a: Array,
    b: Array,
    sizes: Array,
    scale: Array | BlockScales | None = None,
    *,
    rows_last: bool = False,
    split_accumulator: bool = False,
    out_dtype: DTypeLike,
    tiling: GemmTiling | None = None,
    interpret: bool = False,
) -> Array:
    """Return ``(a[rows of g]^T @ b[rows of g]) * scale[g]`` for each group ``g``: the gradient of `grouped_gemm`'s b.

    Args:
        a: bf16, fp16 or FP8 ``[rows, m]``, or ``[m, rows]`` if ``rows_last``, which FP8 operands must be. Operands
            whose sizes are not multiples of 64, in FP8 of 128, are copied.
        b: ``[rows, n]``, or ``[n, rows]``.
        sizes: int32 ``[e]``, see `grouped_gemm`. A group without rows gives zeros.
        scale: fp32 ``[e]``, `BlockScales`, or None for 1.
        rows_last: whether both operands have their rows last.
        split_accumulator: whether FP8 products are added up in fp32 every 128 rows.
        out_dtype: float32, bfloat16 or float16.
        tiling: sizes of the tiles, which change no number. None: those of `tiling_for`.
        interpret: whether to run in Pallas's interpreter, on any device.

    Returns:
        ``out_dtype [e, m, n]``, rounded once from fp32.

    Raises:
        ValueError, TypeError: see `grouped_gemm`.

    >>> if jax.__version_info__ >= (0, 11):
    ...     a, b = jnp.ones((384, 64), jnp.bfloat16), jnp.ones((384, 128), jnp.bfloat16)
    ...     out = grouped_gemm_over_rows(a, b, jnp.array([256, 0]), out_dtype=jnp.float32, interpret=True)
    ...     assert out[:, 0, 0].tolist() == [256.0, 0.0]
    """
    _check_operands(a, b, out_dtype)
    along = 1 if rows_last else 0
    if b.ndim != 2 or a.shape[along] != b.shape[along] or sizes.ndim != 1:
        wanted = "[m, rows] and b [n, rows]" if rows_last else "[rows, m] and b [rows, n]"
        raise ValueError(
            f"a {wanted} must have the same rows, and sizes be [e], got {a.shape}, {b.shape}, {sizes.shape}"
        )
    if a.shape[along] % GROUP_ALIGNMENT:
        raise ValueError(f"the rows must be a multiple of {GROUP_ALIGNMENT}, got {a.shape[along]}; pad them with zeros")
    if a.dtype in _FP8 and not rows_last:
        raise ValueError("Hopper multiplies FP8 operands that have what is summed over last: [m, rows], rows_last=True")
    m, n = a.shape[1 - along], b.shape[1 - along]
    scaling = _scaling(split_accumulator, scale)
    if isinstance(scale, BlockScales):
        blocks = a.shape[along] // GROUP_ALIGNMENT
        _check_block_scales(a, scale, (blocks, m), (blocks, n))
        scale = BlockScales(*(jnp.pad(each, ((0, 0), (0, -each.shape[1] % _LINE))) for each in scale))
    if tiling is None:
        bits, groups, rows = 8 * a.dtype.itemsize, sizes.shape[0], a.shape[along]
        tiling = tiling_for(GroupedShape(True, rows_last, bits, scaling, groups=groups, rows=rows, k=m, n=n))
    form = _Form(tiling, jnp.dtype(out_dtype), over_rows=True, a_last=rows_last, b_last=rows_last, scaling=scaling)
    return _product(_padded(a, interpret), _padded(b, interpret), sizes, scale, form, interpret)[:, :m, :n]


def _check_operands(a: Array, b: Array, out_dtype: DTypeLike) -> None:
    if not (a.dtype in _16_BIT and b.dtype == a.dtype) and not (a.dtype in _FP8 and b.dtype in _FP8):
        raise TypeError(
            f"a and b must both be bfloat16, both float16 or both FP8, got {a.dtype.name} and {b.dtype.name}"
        )
    if jnp.dtype(out_dtype) not in (jnp.float32, *_16_BIT):
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {jnp.dtype(out_dtype).name}")
    if a.ndim != 2 or not a.size or not b.size:
        raise ValueError(f"a must be a matrix, and neither operand empty, got shapes {a.shape} and {b.shape}")


def _scaling(split_accumulator: bool, scale: Array | BlockScales | None) -> Scaling:
    return "block" if isinstance(scale, BlockScales) else "split" if split_accumulator else "none"


def _check_block_scales(a: Array, scales: BlockScales, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    if a.dtype not in _FP8:
        raise TypeError(f"blocks with scales must be FP8, got {a.dtype.name}")
    if (scales.a.shape, scales.b.shape) != (of_a, of_b) or {scales.a.dtype, scales.b.dtype} != {jnp.dtype("float32")}:
        raise ValueError(
            f"the scales of blocks must be float32 {of_a} and {of_b} for these operands, got {scales.a.dtype.name} "
            f"{scales.a.shape} and {scales.b.dtype.name} {scales.b.shape}"
        )


def _padded(x: Array, interpret: bool) -> Array:
    """Return ``x`` with zeros behind its last two axes, to sizes whose tiles can be copied.

    On a GPU these are whole lines: behind the last, copies read zeros and write nothing. The interpreter needs tiles.
    """
    multiple = _LINE if interpret else _step_of(x)
    missing = [(0, -size % multiple) for size in x.shape[-2:]]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + missing) if any(after for _, after in missing) else x


class _Form(NamedTuple):
    """Static facts about a product, apart from shapes and dtypes.

    Args:
        over_rows: whether it sums over the rows of groups, and not over ``k``.
        a_last, b_last: whether what is summed over is the last axis of each.
        scaling: treatment of each step's sum.
    """

    tiling: GemmTiling
    out_dtype: Any
    over_rows: bool
    a_last: bool
    b_last: bool
    scaling: Scaling


class _Tile(NamedTuple):
    """A tile at run time: its first row and column, the end of the rows to write, its group, and its sum's steps.

    ``begin`` is where the sum begins along what is summed over.
    """

    row: Any
    end: Any
    column: Any
    group: Any
    begin: Any
    steps: Any


class _RowsTimesMatrices:
    """Rows of each group times its matrix: how `grouped_gemm` is cut into tiles, and what each reads and writes.

    A tile begins at a multiple of its height from its group's first row. Where it reaches past its group's end, it
    multiplies rows of the next one, and does not write them. Rows behind the last group are one more group, which sums
    over nothing.
    """

    def __init__(self, a: Any, b: Any, sizes: Array, form: _Form):
        from jax.experimental import pallas as pl

        t, self.form = form.tiling, form
        self.step = _step_of(a)
        (rows, k), (self._count, *b_shape) = a.shape, b.shape
        n = b_shape[0 if form.b_last else 1]
        self._steps = pl.cdiv(k, self.step)
        self.table = self._tiles_of(sizes, rows, t.rows)
        self.grid_shape = self.table.shape[0], pl.cdiv(n, t.columns * t.pair)
        self.grid = (self.grid_shape[0] * self.grid_shape[1],)
        self.out_shape = rows, n

    @staticmethod
    def _tiles_of(sizes: Array, rows: int, height: int) -> Array:
        """Return int32 ``[tiles, 3]``: each tile's first row, its group's end, its group; unused ones write nothing."""
        count, ends = sizes.shape[0], jnp.cumsum(sizes, dtype=jnp.int32)
        starts, ends = jnp.append(ends - sizes, ends[-1]), jnp.append(ends, rows)
        tiles = -(-(ends - starts) // height)
        behind = jnp.cumsum(tiles, dtype=jnp.int32)  # the number of tiles up to each group's end
        tile = jnp.arange(rows // height + count + 1, dtype=jnp.int32)
        group = jnp.sum(tile[:, None] >= behind[None], axis=1, dtype=jnp.int32)
        used, group = group <= count, jnp.minimum(group, count)
        first = starts[group] + (tile - (behind - tiles)[group]) * height
        return jnp.stack([jnp.where(used, first, 0), jnp.where(used, ends[group], 0), group], axis=1).astype(jnp.int32)

    def tile(self, table: Any, loop: Any) -> _Tile:
        from jax.experimental import pallas as pl

        row, column = _along_swaths(loop.index[0], self.grid_shape, self.form.tiling)
        first, end, group = (table[row, part] for part in range(3))
        steps = jnp.where(group < self._count, jnp.int32(self._steps), jnp.int32(0))
        first = pl.multiple_of(first, PIECE)  # which the alignment of groups and the height of tiles make it
        return _Tile(first, end, column, jnp.minimum(group, self._count - 1), jnp.int32(0), steps)

    def matrix(self, b: Any, tile: _Tile) -> Any:
        """Return the matrix that a tile reads of ``b``."""
        return b.at[tile.group]

    def target(self, out: Any, tile: _Tile) -> Any:
        """Return the matrix that a tile writes to."""
        return out


class _OverRows:
    """Sums over the rows of each group: how `grouped_gemm_over_rows` is cut into tiles. The grid begins with ``e``."""

    def __init__(self, a: Any, b: Any, sizes: Array, form: _Form):
        from jax.experimental import pallas as pl

        t, self.form = form.tiling, form
        self.step = _step_of(a)
        m, n = (x.shape[0 if form.a_last else 1] for x in (a, b))
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        self.table = jnp.stack([ends - sizes, sizes // self.step], axis=1).astype(jnp.int32)
        self.grid_shape = pl.cdiv(m, t.rows), pl.cdiv(n, t.columns * t.pair)
        self.grid = sizes.shape[0], self.grid_shape[0] * self.grid_shape[1]
        self.out_shape = sizes.shape[0], m, n

    def tile(self, table: Any, loop: Any) -> _Tile:
        from jax.experimental import pallas as pl

        group = loop.index[0]
        row, column = _along_swaths(loop.index[1], self.grid_shape, self.form.tiling)
        begin = pl.multiple_of(table[group, 0], GROUP_ALIGNMENT)
        rows = jnp.int32(self.out_shape[1])
        return _Tile(row * self.form.tiling.rows, rows, column, group, begin, table[group, 1])

    def matrix(self, b: Any, tile: _Tile) -> Any:
        """Return the matrix that a tile reads of ``b``."""
        return b

    def target(self, out: Any, tile: _Tile) -> Any:
        """Return the matrix that a tile writes to."""
        return out.at[tile.group]


_Problem = _RowsTimesMatrices | _OverRows


def _step_of(a: Any) -> int:
    """Return the number of values of each line of its operands that a step multiplies."""
    return STEP_BYTES // a.dtype.itemsize


def _along_swaths(index: Any, grid_shape: tuple[int, int], t: GemmTiling) -> tuple[Any, Any]:
    """Return the row of tiles and the first column of a thread block's tile."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row, column = plgpu.planar_snake(index, grid_shape, 0, t.swath)
    if t.pair > 1:
        column = column * t.pair + lax.axis_index("pair")
    return row, column * t.columns


def _for_each_tile(problem: _Problem, table: Any, body: Callable[[_Tile, Any], None]) -> Any:
    """Call ``body(tile, first)`` for a thread block's tiles; ``first`` counts the steps before. Return those of all."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.nd_loop(problem.grid, collective_axes="sm", init_carry=jnp.int32(0))
    def steps(loop: Any, carry: Any) -> Any:
        tile = problem.tile(table, loop)
        body(tile, carry)
        return carry + tile.steps

    return steps


# Under a jit of its own: all layers whose shapes agree share one lowering.
@functools.partial(jax.jit, static_argnames=("form", "interpret"))
def _product(
    a: Array, b: Array, sizes: Array, scale: Array | BlockScales | None, form: _Form, interpret: bool
) -> Array:
    check_jax()
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t = form.tiling
    problem = _OverRows(a, b, sizes, form) if form.over_rows else _RowsTimesMatrices(a, b, sizes, form)
    step, width = problem.step, STEP_BYTES // form.out_dtype.itemsize

    def buffers(lines: int, last: bool, dtype: Any) -> Any:
        shape = (lines, step) if last else (step, lines)
        return plgpu.SMEM((t.stages, *shape), dtype, transforms=swizzled(step))

    def swizzled(columns: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(STEP_BYTES)  # type: ignore

    of_blocks = tuple(scale) if isinstance(scale, BlockScales) else ()
    of_groups = () if scale is None or of_blocks else (scale,)

    def kernel(table: Any, a: Any, b: Any, *refs: Any) -> None:
        scales, (out, *scratch) = refs[: len(of_blocks + of_groups)], refs[len(of_blocks + of_groups) :]
        loads = lax.axis_index("warpgroup") == t.warpgroups
        lax.cond(
            loads,
            lambda: _load(problem, (table, a, b, *(scales if of_blocks else ())), *scratch),
            lambda: _multiply(problem, table, scales[0] if of_groups else None, out, *scratch),
        )

    ring = [buffers(t.rows, form.a_last, a.dtype), buffers(t.columns, form.b_last, b.dtype)]
    if of_blocks:
        ring += [plgpu.SMEM((t.stages, lines), jnp.float32) for lines in (t.rows, t.columns)]

    emptied = plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages)
    cluster: dict[str, Any] = {}
    if t.pair > 1:
        # What a thread block copies fills its neighbour's buffers, too: both must have left them.
        emptied = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=t.warpgroups, num_barriers=t.stages)
        cluster = {"cluster": (t.pair,), "cluster_names": ("pair",)}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(problem.out_shape, form.out_dtype),
        scratch_types=[
            tuple(ring),
            plgpu.SMEM((t.warpgroups, t.outputs, PIECE, width), form.out_dtype, transforms=swizzled(width)),
            plgpu.Barrier(num_arrivals=len(ring), num_barriers=t.stages),
            emptied,
        ],
        grid=(min(multiprocessors() // t.pair, prod(problem.grid)),),
        grid_names=("sm",),
        **cluster,
        num_threads=t.warpgroups + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(problem.table, a, b, *of_blocks, *of_groups)


def _load(problem: _Problem, operands: Any, ring: Any, staged: Any, filled: Any, emptied: Any) -> None:
    """Fill the ring with the operands of each step of each tile."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    form, (table, a, b, *scales), (a_ring, b_ring, *scale_rings) = problem.form, operands, ring
    t = form.tiling
    plgpu.set_max_registers(t.registers[1], action="decrease")

    def part(x: Any, last: bool, lines: Any, block: Any) -> Any:
        return x.at[lines, block] if last else x.at[block, lines]

    def load_tile(tile: _Tile, first: Any) -> None:
        rows, columns, matrix = pl.ds(tile.row, t.rows), pl.ds(tile.column, t.columns), problem.matrix(b, tile)

        @pl.loop(0, tile.steps)
        def _step(step: Any) -> None:
            slot, block = _slot(t, first + step), pl.ds(tile.begin + step * problem.step, problem.step)

            @pl.when(first + step >= t.stages)
            def _wait() -> None:
                plgpu.barrier_wait(emptied.at[slot])

            # A pair has the same rows: each of the two reads half of them into both.
            shared = ("pair",) if t.pair > 1 else None
            of_a, of_b = part(a, form.a_last, rows, block), part(matrix, form.b_last, columns, block)
            plgpu.copy_gmem_to_smem(of_a, a_ring.at[slot], filled.at[slot], collective_axes=shared)
            plgpu.copy_gmem_to_smem(of_b, b_ring.at[slot], filled.at[slot])
            if scales:
                index = lax.div(tile.begin, jnp.int32(problem.step)) + step
                of_rows, of_columns = scales[0].at[index, rows], problem.matrix(scales[1], tile).at[index, columns]
                plgpu.copy_gmem_to_smem(of_rows, scale_rings[0].at[slot], filled.at[slot], collective_axes=shared)
                plgpu.copy_gmem_to_smem(of_columns, scale_rings[1].at[slot], filled.at[slot])

    steps = _for_each_tile(problem, table, load_tile)
    for slot in range(t.stages):  # a thread block may not end while its neighbour signals it

        @pl.when(steps > slot)
        def _last(slot: int = slot) -> None:
            plgpu.barrier_wait(emptied.at[slot])


def _multiply(
    problem: _Problem, table: Any, scales: Any, out: Any, ring: Any, staged: Any, filled: Any, emptied: Any
) -> None:
    """Multiply the operands in the ring, and write each tile."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    form, (a_ring, b_ring, *scale_rings) = problem.form, ring
    t, width = form.tiling, STEP_BYTES // form.out_dtype.itemsize
    plgpu.set_max_registers(t.registers[0], action="increase")
    warpgroup = lax.axis_index("warpgroup")
    staged = staged.at[warpgroup]
    piece_shape, layout = (PIECE, t.columns), plgpu.Layout.WGMMA

    def row_of(piece: int) -> Any:
        return (warpgroup * t.pieces + piece) * PIECE

    def add_product(sums: Any, slot: Any, piece: int) -> None:
        rows = pl.ds(row_of(piece), PIECE)
        a = a_ring.at[slot, rows] if form.a_last else a_ring.at[slot, :, rows].transpose((1, 0))
        b = b_ring.at[slot].transpose((1, 0)) if form.b_last else b_ring.at[slot]
        plgpu.wgmma(sums, a, b)

    def summed_in_tensor_cores(tile: _Tile, first: Any) -> tuple[Any, ...]:
        def run(*sums: Any) -> tuple[Any, ...]:
            @pl.loop(0, tile.steps)
            def _step(step: Any) -> None:
                slot = _slot(t, first + step)
                plgpu.barrier_wait(filled.at[slot])
                for piece, values in enumerate(sums):
                    add_product(values, slot, piece)
                # This step's products run on; those of the step before are done, so its buffer may be filled again.
                plgpu.wgmma_wait(t.pieces)

                @pl.when(step > 0)
                def _emptied() -> None:
                    plgpu.barrier_arrive(emptied.at[_slot(t, first + step - 1)])

            values = tuple(piece[...] for piece in sums)  # waits for the last step's products

            @pl.when(tile.steps > 0)
            def _emptied() -> None:
                plgpu.barrier_arrive(emptied.at[_slot(t, first + tile.steps - 1)])

            return values

        return pl.run_scoped(run, *(plgpu.ACC(piece_shape, jnp.float32),) * t.pieces)  # type: ignore

    def block_scale(slot: Any) -> Callable[[int], Callable[[Any], Any]]:
        """Return a function of a piece that reads its scales of a step, and returns one that scales its sum."""
        of_rows, of_columns = (scales.at[slot] for scales in scale_rings)
        square = not form.over_rows  # one scale for all columns of a tile
        columns = of_columns[0] if square else plgpu.load(of_columns, layout=layout.reduce(0), optimized=False)

        def of_piece(piece: int) -> Callable[[Any], Any]:
            rows = plgpu.load(of_rows.at[pl.ds(row_of(piece), PIECE)], layout=layout.reduce(1), optimized=False)
            if square:
                return lambda values: values * wide(rows * columns, 0)
            return lambda values: values * wide(columns, 1) * wide(rows, 0)

        return of_piece

    def wide(vector: Any, axis: int) -> Any:
        return lax.broadcast_in_dim(vector, piece_shape, (axis,))

    def summed_outside(tile: _Tile, first: Any) -> tuple[Any, ...]:
        def add_step(step: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            slot = _slot(t, first + step)
            plgpu.barrier_wait(filled.at[slot])
            scale_of = block_scale(slot) if scale_rings else None
            new = []
            for piece, before in enumerate(sums):

                def product(values: Any, piece: int = piece) -> Any:
                    add_product(values, slot, piece)
                    return values[...]

                scale = scale_of(piece) if scale_of else None
                values = pl.run_scoped(product, plgpu.ACC(piece_shape, jnp.float32))  # type: ignore
                if piece == t.pieces - 1:
                    plgpu.barrier_arrive(emptied.at[slot])
                new.append(before + (values if scale is None else scale(values)))
            return tuple(new)

        zeros = plgpu.layout_cast(jnp.zeros(piece_shape, jnp.float32), layout)
        return lax.fori_loop(0, tile.steps, add_step, (zeros,) * t.pieces)

    def store(values: Any, tile: _Tile, piece: int) -> None:
        row, target = tile.row + row_of(piece), problem.target(out, tile)

        @pl.when(row < tile.end)
        def _store() -> None:
            for i in range(t.columns // width):
                buffer = staged.at[i % t.outputs]
                # Copies from other buffers may be in flight.
                plgpu.wait_smem_to_gmem(t.outputs - 1, wait_read_only=True)
                buffer[...] = values[:, i * width : (i + 1) * width].astype(form.out_dtype)
                plgpu.commit_smem()
                columns = pl.ds(tile.column + i * width, width)
                plgpu.copy_smem_to_gmem(buffer, target.at[pl.ds(row, PIECE), columns])

    def multiply_tile(tile: _Tile, first: Any) -> None:
        sums = (summed_in_tensor_cores if form.scaling == "none" else summed_outside)(tile, first)
        for piece, values in enumerate(sums):
            store(values if scales is None else values * scales[tile.group], tile, piece)

    _for_each_tile(problem, table, multiply_tile)
    plgpu.wait_smem_to_gmem(0)


def _slot(t: GemmTiling, step: Any) -> Any:
    """Return the buffer of the ring that holds a step's operands."""
    return lax.rem(step, jnp.int32(t.stages))
