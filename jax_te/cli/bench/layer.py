"""``jax-te bench layer``: single layers, next to te.jax's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jax_te.bench import Case, Row, Settings, bench_layer
from jax_te.cli.bench.options import BenchLayer
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits
from jax_te.config import ParallelConfig
from jax_te.recipe import recipe_from_name
from jax_te.sharding import make_mesh


def run(options: BenchLayer) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for a mesh that the options do not fit, and for sizes that exceed the memory.
    """
    sizes = None if options.mesh is None else ParallelConfig.parse(options.mesh)
    if options.sequence_parallel and (sizes is None or sizes.tensor == 1):
        raise ValueError("--sequence-parallel shards activations over the tensor axis; give --mesh with tensor=N")
    _check_sizes(options, 1 if sizes is None else sizes.num_devices)
    return show_rows(_rows(options, sizes), options.output)


def _check_sizes(options: BenchLayer, devices: int) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory."""
    tokens, hidden, ffn = options.batch_size * options.seq_len, options.hidden_size, options.ffn_hidden_size
    # In bf16, and at the very least: the input, its gradient and the output's, a kernel and its gradient.
    values = tokens * (2 * hidden + min(hidden, ffn)) + 2 * hidden * ffn
    # Fused kernels of GPUs keep no attention scores.
    if "transformer_layer" in options.modules and jax.default_backend() == "cpu":
        values += tokens * options.num_heads * options.seq_len
    check_fits(2 * values // devices, devices, "--batch-size, --seq-len or another size, or give a larger --mesh")


def _rows(options: BenchLayer, sizes: ParallelConfig | None) -> Iterator[Row]:
    shape = (options.batch_size, options.seq_len, options.hidden_size, options.num_heads, options.ffn_hidden_size)
    mesh = None if sizes is None else make_mesh(sizes)
    recipes = [recipe_from_name(name) for name in options.recipes]
    cases = [
        Case(module=module, shape=shape, recipe=recipe, mesh=mesh, sequence_parallel=options.sequence_parallel)
        for module in options.modules
        for recipe in recipes
    ]
    backend: Any = options.backend  # one of the names that the option allows
    settings = Settings(backend=backend, rounds=options.rounds, calls=options.calls)
    yield from bench_layer(cases, settings, hlo=None if options.hlo is None else Path(options.hlo))
