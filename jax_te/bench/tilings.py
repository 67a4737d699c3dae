"""Tilings of the grouped products of an expert layer, measured one beside another on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.bench.contestants import CompiledStep, SharedState, run_contestants
from jax_te.bench.settings import Row, Settings
from jax_te.ops import row_bound
from jax_te.ops.pallas import (
    GROUP_ALIGNMENT,
    BlockScales,
    GemmTiling,
    GroupedShape,
    grouped_gemm,
    grouped_gemm_over_rows,
    tile_candidates,
    tiling_for,
    variants,
)
from jax_te.recipe import Float8BlockScaling, MMParams, Recipe
from jax_te.typing import Array

_VARIED = 2
"""Number of sizes of tiles, the fastest ones, whose swaths, stages and buffers are varied."""


def grouped_shapes(
    recipe: Recipe | None, *, tokens: int, hidden_size: int, ffn_hidden_size: int, experts: int, topk: int
) -> list[GroupedShape]:
    """Return the grouped products of a layer of gated experts, forward and backward, each shape once.

    Args:
        recipe: delayed, current or block scaling. None: operands in bf16.
        tokens: number of tokens of a step, each of which goes to ``topk`` experts.
        hidden_size, ffn_hidden_size: sizes of the hidden states and of an expert's activation.
        experts, topk: number of experts, and of those that a token goes to.

    >>> for shape in grouped_shapes(None, tokens=64, hidden_size=128, ffn_hidden_size=256, experts=4, topk=2):
    ...     print(shape.over_rows, shape.b_last, shape.rows, shape.k, shape.n)
    False False 640 128 512
    False True 640 512 128
    True False 640 128 512
    False False 640 256 128
    False True 640 128 256
    True False 640 256 128
    """
    rows = row_bound(tokens * topk, experts, alignment=GROUP_ALIGNMENT)
    bits = 16 if recipe is None else 8

    def shape(params: MMParams | None, k: int, n: int, *, over_rows: bool, b_last: bool) -> GroupedShape:
        split = "split" if params is not None and params.use_split_accumulator else "none"
        scaling = "block" if isinstance(recipe, Float8BlockScaling) else split
        return GroupedShape(over_rows, b_last or bits == 8, bits, scaling, groups=experts, rows=rows, k=k, n=n)

    fprop, dgrad, wgrad = (getattr(recipe, f"fp8_gemm_{gemm}", None) for gemm in ("fprop", "dgrad", "wgrad"))
    shapes = []
    for k, n in ((hidden_size, 2 * ffn_hidden_size), (ffn_hidden_size, hidden_size)):
        shapes += [
            shape(fprop, k, n, over_rows=False, b_last=False),
            shape(dgrad, n, k, over_rows=False, b_last=True),
            shape(wgrad, k, n, over_rows=True, b_last=False),
        ]
    return [*dict.fromkeys(shapes)]


def bench_tilings(
    shape: GroupedShape,
    settings: Settings,
    keep: Callable[[GroupedShape, GemmTiling], None],
    *,
    sizes: Sequence[GemmTiling] | None = None,
    interpret: bool = False,
) -> Iterator[Row]:
    """Yield rows of a product with the tiling that it has now, then with others.

    First come all sizes of tiles, then variants of the fastest ones.

    Args:
        shape: product to measure, whose groups have equally many rows.
        settings: settings of the measurement.
        keep: function that is called with the shape and its fastest tiling.
        sizes: tilings to measure first. None: those of `tile_candidates`.
        interpret: whether to run in Pallas's interpreter, on any device.
    """
    operands = _operands(shape)
    now = tiling_for(shape)
    measured: dict[GemmTiling, float] = {}

    def measure(tilings: Sequence[GemmTiling]) -> Iterator[Row]:
        # The present one takes part each time: a GPU under load slows down, and only one command's times compare.
        others = [each for each in tilings if each != now and each not in measured]
        contestants = [_contestant(shape, tiling, operands, interpret) for tiling in (now, *others)]
        rows = run_contestants(contestants, operands, shape.rows, settings)
        for tiling, row in zip((now, *others), rows, strict=True):
            if "ms" in row:
                measured[tiling] = row.get("speed_ratio", 1.0)
                row["tflops"] = float(f"{shape.flops / row['ms'] / 1e9:.4g}")
            row.pop("tokens_s", None)
            yield row | {"shape": shape._asdict(), "tiling": asdict(tiling)}

    yield from measure(tile_candidates(shape) if sizes is None else sizes)
    fastest = sorted(measured, key=measured.__getitem__, reverse=True)[:_VARIED]
    yield from measure([variant for tiling in fastest for variant in variants(tiling, shape)])
    if measured:
        keep(shape, max(measured, key=measured.__getitem__))


def _contestant(shape: GroupedShape, tiling: GemmTiling, operands: Any, interpret: bool) -> CompiledStep:
    product = grouped_gemm_over_rows if shape.over_rows else grouped_gemm
    last = {"rows_last": shape.b_last} if shape.over_rows else {"b_transposed": shape.b_last}

    def step(state: None, operands: tuple[Any, ...]) -> tuple[None, Array]:
        return state, product(
            *operands,
            **last,
            split_accumulator=shape.scaling == "split",
            out_dtype=jnp.bfloat16,
            tiling=tiling,
            interpret=interpret,
        )

    name = f"{tiling.rows} x {tiling.columns}, pair {tiling.pair}, swath {tiling.swath}, stages {tiling.stages}"
    return CompiledStep(
        f"{name}, outputs {tiling.outputs}",
        state=SharedState(lambda: None),
        lower=lambda: jax.jit(step).lower(None, operands),
    )


def _operands(shape: GroupedShape) -> tuple[Any, ...]:
    """Return both operands, the groups' sizes, and for FP8 the scales."""
    dtype = jnp.bfloat16 if shape.bits == 16 else jnp.float8_e4m3fn
    groups, rows, k, n = shape.groups, shape.rows, shape.k, shape.n
    first = (rows, k)
    second = (rows, n) if shape.over_rows else (groups, k, n)
    if shape.over_rows and shape.b_last:
        first = (k, rows)
    if shape.b_last:
        second = (*second[:-2], second[-1], second[-2])
    a, b = (
        jax.random.normal(jax.random.key(seed), size, jnp.bfloat16).astype(dtype)
        for seed, size in enumerate((first, second))
    )
    of_group = rows // groups // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    sizes = jnp.full(groups, of_group, jnp.int32)
    if shape.bits == 16:
        return a, b, sizes
    if shape.scaling != "block":
        return a, b, sizes, jnp.ones(groups)
    blocks_of_k, blocks_of_n, blocks_of_rows = (-(-size // GROUP_ALIGNMENT) for size in (k, n, rows))
    if shape.over_rows:
        scales = BlockScales(jnp.ones((blocks_of_rows, k)), jnp.ones((blocks_of_rows, n)))
    else:
        scales = BlockScales(jnp.ones((blocks_of_k, rows)), jnp.ones((groups, blocks_of_k, blocks_of_n)))
    return a, b, sizes, scales
