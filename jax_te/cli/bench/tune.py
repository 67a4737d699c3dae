"""``jax-te bench tune``: tilings of the grouped GEMMs of an expert layer, and a table of the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jax_te.bench import Row, Settings, bench_tilings, grouped_shapes
from jax_te.cli.bench.options import BenchTune
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits
from jax_te.ops.pallas import GemmTiling, GroupedShape, read_table, supported, write_table
from jax_te.recipe import recipe_from_name


def run(options: BenchTune) -> int:
    """Return the exit status, 0, once the rows are printed and the table is written.

    Raises:
        ValueError: on a device that does not run these kernels, for a file that is no table, and for sizes that exceed
            the memory.
    """
    if options.moe_router_topk > options.num_experts:
        raise ValueError(
            f"--moe-router-topk {options.moe_router_topk} is more than --num-experts {options.num_experts}; give fewer"
        )
    shapes = _shapes(options)
    check_fits(max(map(_bytes, shapes)), 1, "lower --batch-size, --seq-len or another size")
    can_run, reason = supported()
    if not can_run:
        raise ValueError(reason)
    table = None if options.table is None else Path(options.table)
    fastest = read_table(table) if table is not None and table.exists() else {}
    return show_rows(_rows(options, shapes, table, dict(fastest)), options.output)


def _rows(
    options: BenchTune, shapes: list[GroupedShape], table: Path | None, fastest: dict[GroupedShape, GemmTiling]
) -> Iterator[Row]:
    """Yield the rows of each shape, after which the table has its fastest tiling."""
    settings = Settings(rounds=options.rounds, calls=options.calls)
    for shape in shapes:
        yield from bench_tilings(shape, settings, fastest.__setitem__)
        if table is not None:
            write_table(table, fastest)


def _shapes(options: BenchTune) -> list[GroupedShape]:
    """Return the products of all recipes, each shape once."""
    shapes = [
        shape
        for name in options.recipes
        for shape in grouped_shapes(
            recipe_from_name(name),
            tokens=options.batch_size * options.seq_len,
            hidden_size=options.hidden_size,
            ffn_hidden_size=options.ffn_hidden_size,
            experts=options.num_experts,
            topk=options.moe_router_topk,
        )
    ]
    return [*dict.fromkeys(shapes)]


def _bytes(shape: GroupedShape) -> int:
    """Return the bytes of both operands, of which a copy exists while they are made, and of the result in bf16."""
    kernels = shape.groups * shape.k * shape.n
    features = shape.k + shape.n
    return 2 * (2 * shape.rows * features + 2 * kernels)
