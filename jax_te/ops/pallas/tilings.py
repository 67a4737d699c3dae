"""Tilings of the grouped matrix products: those measured as the fastest for a shape, and a rule for all others."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log2
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from jax_te._whole_files import whole_or_nothing

PIECE = 64
"""Rows of one wgmma, and of one store: a tile that reaches past its group's end leaves out the pieces behind it."""

STEP_BYTES = 128
"""Bytes of a line of an operand's tile: the longest swizzle pattern of shared memory for wgmma."""

Scaling = Literal["none", "split", "block"]
"""What becomes of each step's sum: it stays in the tensor cores, is added up outside, or is scaled outside, too."""

TABLE = "JAX_TE_TILINGS"
"""Environment variable with a table's file, whose tilings come before all others. A process reads a file once."""

MEASURED = Path(__file__).with_name("tilings.json")
"""The library's own table: the fastest on an H200, as ``jax-te bench tune`` has written them."""

_SHARED_MEMORY = 227 * 1024 - 1024
"""Bytes of shared memory of a thread block on Hopper, but for those of barriers."""

_REGISTERS = 65536
"""Registers of a multiprocessor."""

_OTHER_REGISTERS = 32
"""Registers of a multiplying thread beside those of its sums, at least: addresses and indices."""


@dataclass(frozen=True, kw_only=True)
class GemmTiling:
    """Tiling of a product: a thread block computes ``[64 * pieces * warpgroups, columns]`` at a time.

    Args:
        warpgroups: number of those that multiply; one more loads.
        pieces: number of pieces of 64 rows for each of them.
        columns: number of columns of a tile, at most 256.
        pair: number of thread blocks, side by side along the columns, that share what they read of the rows: 1 or 2.
        swath: number of tiles along the rows whose columns are processed together, so that operands are found in the
            cache.
        stages: number of buffers of the ring.
        registers: number of registers of a multiplying thread, and of a loading one.
        outputs: number of buffers through which a warpgroup writes its results: 1 or 2.
    """

    warpgroups: int
    pieces: int
    columns: int
    pair: int
    swath: int
    stages: int
    registers: tuple[int, int]
    outputs: int = 2

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return PIECE * self.pieces * self.warpgroups

    @property
    def shared_memory(self) -> int:
        """Bytes of the ring and of the buffers for results."""
        results = self.warpgroups * self.outputs * PIECE * STEP_BYTES
        return self.stages * (self.rows + self.columns) * STEP_BYTES + results


# The fastest of some that were tried on an H100. Groups of few rows leave less of a tall tile empty,
# and small matrices few tiles to share reads.
LARGE = GemmTiling(warpgroups=2, pieces=2, columns=128, pair=2, swath=16, stages=4, registers=(240, 24))
SMALL = GemmTiling(warpgroups=2, pieces=1, columns=256, pair=1, swath=8, stages=4, registers=(240, 24))
# Sums outside of the tensor cores take as many registers again.
SPLIT = GemmTiling(warpgroups=3, pieces=1, columns=128, pair=2, swath=8, stages=4, registers=(160, 32))
# A scale for each column takes more registers than three warpgroups have. The fastest of some on an H200.
BLOCK_OVER_ROWS = GemmTiling(
    warpgroups=2, pieces=1, columns=128, pair=1, swath=8, stages=6, registers=(240, 24), outputs=1
)


class GroupedShape(NamedTuple):
    """Shape and form of a grouped product, which its tiling depends on.

    Args:
        over_rows: whether it sums over the rows of each group, as for gradients of kernels.
        b_last: whether the second operand has what is summed over last.
        bits: number of bits of the operands' values.
        scaling: what becomes of each step's sum.
        groups: number of groups.
        rows: number of rows of all groups together.
        k: number of features of the first operand.
        n: number of features of the second operand.
    """

    over_rows: bool
    b_last: bool
    bits: int
    scaling: Scaling
    groups: int
    rows: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        """Floating-point operations, if all rows belong to groups."""
        return 2.0 * self.rows * self.k * self.n

    @property
    def _form(self) -> tuple[bool, bool, int, Scaling]:
        return self[:4]

    def distance(self, other: GroupedShape) -> float | None:
        """Return by how many factors of two the sizes differ, None if one differs by more or the forms are others.

        >>> mixtral = GroupedShape(False, False, 16, "none", groups=8, rows=32768, k=4096, n=28672)
        >>> mixtral.distance(mixtral._replace(rows=16384)), mixtral.distance(mixtral._replace(n=768))
        (1.0, None)
        """
        if self._form != other._form:
            return None
        pairs = (
            (self.rows / self.groups, other.rows / other.groups),
            (self.k, other.k),
            (self.n, other.n),
        )
        factors = [abs(log2(one / another)) for one, another in pairs]
        return sum(factors) if max(factors) <= 1.0 else None


Table = Mapping[GroupedShape, GemmTiling]


def tiling_for(shape: GroupedShape) -> GemmTiling:
    """Return a tiling for the shape: a table's for the nearest shape, or if none is near, one by a rule.

    The user's table comes first (`TABLE`), then the library's (`MEASURED`). A shape is near if no size differs by more
    than a factor of two. All tilings give the same numbers.
    """
    users = os.environ.get(TABLE)
    for path in (*([users] if users else []), str(MEASURED)):
        table = _read_once(path)
        distances = {known: distance for known in table if (distance := shape.distance(known)) is not None}
        if distances:
            return table[min(distances, key=distances.__getitem__)]
    return _by_rule(shape)


def _by_rule(shape: GroupedShape) -> GemmTiling:
    if shape.scaling == "block" and shape.over_rows:
        return BLOCK_OVER_ROWS
    if shape.scaling != "none":
        return SPLIT
    rows = shape.k if shape.over_rows else shape.rows // shape.groups  # of the result of each group
    return LARGE if rows >= 2048 and shape.n >= 2048 else SMALL


@functools.cache
def _read_once(path: str) -> Table:
    try:
        return read_table(Path(path))
    except OSError as error:
        raise ValueError(f"{TABLE}={path} cannot be read ({error.strerror}); give a table, or unset it") from error


def read_table(path: Path) -> Table:
    """Return the tilings of a table that `write_table` has written.

    Raises:
        ValueError: for a file that is no such table.
        OSError: if the file cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["tilings"]
        table = {GroupedShape(**entry["shape"]): _tiling(entry["tiling"]) for entry in entries}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a table of tilings ({error}); write one with jax-te bench tune --table FILE"
        ) from error
    for shape, tiling in table.items():
        if any(type(size) is not int or size < 1 for size in shape[-4:]):
            raise ValueError(f"{path} has sizes that are no positive integers: {shape}; write it anew")
        lacks = lacking(tiling, shape)
        if lacks is not None:
            raise ValueError(f"{path} has a tiling that cannot run: {lacks}; write it anew with jax-te bench tune")
    return table


def _tiling(values: dict[str, Any]) -> GemmTiling:
    multiplying, loading = values["registers"]
    read: dict[str, Any] = values | {"registers": (multiplying, loading)}  # JSON has a list
    return GemmTiling(**read)


def write_table(path: Path, table: Table) -> None:
    """Write a table of tilings as JSON."""
    entries = [{"shape": shape._asdict(), "tiling": asdict(tiling)} for shape, tiling in table.items()]
    text = json.dumps({"tilings": entries}, indent=1) + "\n"
    with whole_or_nothing(path.parent) as new:
        new.part(path.name).write_text(text, encoding="utf-8")


def lacking(tiling: GemmTiling, shape: GroupedShape) -> str | None:
    """Return why a product cannot be tiled in this way on a Hopper GPU, None if it can."""
    if shape.scaling not in get_args(Scaling):
        return f"scaling is one of {', '.join(get_args(Scaling))}, not {shape.scaling!r}"
    counts = [getattr(tiling, each.name) for each in fields(tiling) if each.name != "registers"]
    if any(not isinstance(count, int) or count < 1 for count in (*counts, *tiling.registers)):
        return f"all fields are positive integers, not {tiling}"
    if tiling.pair > 2 or tiling.outputs > 2 or tiling.columns > 256 or tiling.columns % PIECE:
        return f"pair and outputs are 1 or 2, columns 64, 128, 192 or 256, not {tiling}"
    if shape.scaling == "block" and tiling.columns != 128:
        return f"the scales of blocks are those of 128 columns, not of {tiling.columns}"
    scales = tiling.stages * 4 * (tiling.rows + tiling.columns) if shape.scaling == "block" else 0
    if tiling.shared_memory + scales > _SHARED_MEMORY:
        return f"{tiling.shared_memory + scales} bytes of shared memory are more than {_SHARED_MEMORY}"
    multiplying, loading = tiling.registers
    if 128 * (tiling.warpgroups * multiplying + loading) > _REGISTERS:
        return f"{tiling.warpgroups} x {multiplying} + {loading} registers for 128 threads each are more than the GPU's"
    # A warpgroup of 128 threads holds the sums of its pieces, and outside of the tensor cores one piece's product.
    piece = PIECE * tiling.columns // 128
    sums = tiling.pieces * piece + (piece if shape.scaling != "none" else 0)
    if sums + _OTHER_REGISTERS > multiplying:
        return f"{sums} registers of sums and {_OTHER_REGISTERS} others are more than {multiplying}"
    # The assembler goes by what each thread has before warpgroups take more, or give some back.
    launched = _REGISTERS // (128 * (tiling.warpgroups + 1))
    if piece + _OTHER_REGISTERS > launched:
        return f"{piece} registers of a product and {_OTHER_REGISTERS} others are more than {launched}"
    return None


_REGISTERS_OF = {1: (240, 40), 2: (240, 24), 3: (160, 32)}
"""Registers of a multiplying and of a loading thread, by the number of warpgroups that multiply."""


def tile_candidates(shape: GroupedShape) -> list[GemmTiling]:
    """Return tilings of every size of tile that can run, each with as many stages as fit, up to 6."""
    found = []
    for warpgroups, pieces, columns, pair in _tile_sizes():
        for stages, outputs in ((stages, outputs) for stages in (6, 5, 4, 3) for outputs in (2, 1)):
            tiling = GemmTiling(
                warpgroups=warpgroups,
                pieces=pieces,
                columns=columns,
                pair=pair,
                swath=8,
                stages=stages,
                registers=_REGISTERS_OF[warpgroups],
                outputs=outputs,
            )
            if lacking(tiling, shape) is None:
                found.append(tiling)
                break
    return found


def _tile_sizes() -> Sequence[tuple[int, int, int, int]]:
    """Return warpgroups, pieces, columns and pair of every size of tile."""
    return [
        (warpgroups, pieces, columns, pair)
        for warpgroups in (2, 3)
        for pieces in (1, 2)
        for columns in (128, 192, 256)
        for pair in (1, 2)
    ]


def variants(tiling: GemmTiling, shape: GroupedShape) -> list[GemmTiling]:
    """Return tilings of the same size of tile, with other swaths, stages and buffers for results, that can run."""
    made = [replace(tiling, swath=swath) for swath in (4, 16, 32) if swath != tiling.swath]
    made.append(replace(tiling, outputs=3 - tiling.outputs))
    if tiling.stages > 3:
        made.append(replace(tiling, stages=tiling.stages - 1))
    return [each for each in made if lacking(each, shape) is None]
