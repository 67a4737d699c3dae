"""``jax-te bench checkpoint``: saving and restoring of a train state, next to plain Orbax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jax_te.bench import Row, Variant, bench_checkpoints, create_bench_state
from jax_te.cli.bench.options import BenchCheckpoint
from jax_te.cli.bench.preset_config import check_parameters_fit, preset_config, sizes_of
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.build import build_model
from jax_te.cli.presets import PRESETS
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig


def run(options: BenchCheckpoint) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for a mesh that could not train the model, and for a model that exceeds the memory.
    """
    configs = [_config(options, recipe) for recipe in options.recipes]
    for config in configs:
        check_parameters_fit(config)
    return show_rows(_rows(options, configs), options.output)


def _config(options: BenchCheckpoint, recipe: str) -> RunConfig:
    sizes = ParallelConfig() if options.mesh is None else ParallelConfig.parse(options.mesh)
    return preset_config(
        options.preset,
        recipe,
        num_layers=options.num_layers,
        vocab_size=options.vocab_size,
        mesh=options.mesh,
        distributed_optimizer=options.distributed_optimizer,
        # No step is run, so the batch size only has to divide over every mesh.
        batch_size=PRESETS[options.preset].values["batch_size"] * sizes.batch_devices,
    )


def _rows(options: BenchCheckpoint, configs: list[RunConfig]) -> Iterator[Row]:
    for recipe, config in zip(options.recipes, configs, strict=True):
        variant = Variant(name=recipe, recipe=config.make_recipe(), build=build_model(config))
        state = create_bench_state(variant, sizes_of(config), "auto")
        yield from bench_checkpoints(state, Path(options.folder), options.rounds, recipe)
