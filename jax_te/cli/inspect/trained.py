"""Loading of a trained run: its configuration and recipe, its newest state, and held-out batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jax_te.checkpoint import CHECKPOINT_FOLDER, TrainCheckpointer
from jax_te.cli.build import abstract_model_state, contexts, warnings_as_lines
from jax_te.cli.inspect.options import InspectPrecision, InspectRecipes, InspectSensitivity
from jax_te.cli.memory import check_memory
from jax_te.cli.objective import run_objective
from jax_te.cli.options import DEFAULT_RUN
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import holds_run, read_config
from jax_te.cli.run_text import check_text, run_text, run_tokenizer
from jax_te.data import heldout_batches
from jax_te.recipe import Recipe, recipe_from_name
from jax_te.training import TrainState

_REMEDY = "Put the run's text back, or give another one by --data, whose held-out part is read"
"""What to do about a text whose held-out part is not the run's: it may have been trained on."""


def run_and_recipe(
    options: InspectPrecision | InspectRecipes | InspectSensitivity,
) -> tuple[RunConfig, Recipe | None]:
    """Return the configuration of a run, on one device, and the recipe to inspect.

    Raises:
        ValueError: for a folder without a run.
    """
    config = read_config(Path(options.output))
    if config is None:
        raise ValueError(f"{options.output} holds no run; train one with: jax-te train --output {options.output}")
    # Rules of another file take the place of the run's; without any, the configuration refuses the modules.
    others = None if isinstance(options, InspectSensitivity) else options.precision_config
    named = options.factory_modules if config.precision_config is not None or others is None else None
    # One device and any available backend, wherever it was trained.
    config = config.on_one_device(named)
    return config, config.make_recipe() if options.recipe is None else recipe_from_name(options.recipe)


def run_or_preset(output: str | None, preset: str | None) -> tuple[RunConfig | None, str]:
    """Return the configuration of a run, None for a preset, and the name of the inspected run or preset.

    Raises:
        ValueError: for a folder without a run, and for both a run and a preset.
    """
    if preset is not None:
        if output is not None:
            raise ValueError("--output names a run and --preset a preset to look at; give one of them")
        return None, f"preset {preset}"
    folder = DEFAULT_RUN if output is None else output
    config = read_config(Path(folder))
    if config is None:
        raise ValueError(f"{folder} holds no run; give a --preset, or train one with: jax-te train --output {folder}")
    return config, folder


def check_saved(output: str) -> None:
    """Raise ValueError if the run in a folder has saved no checkpoint."""
    if not holds_run(Path(output)):
        raise ValueError(f"{output} has saved no checkpoint yet; let its run go on: jax-te train --output {output}")


def newest_state(output: str, config: RunConfig) -> tuple[TrainState, dict[str, Any], int]:
    """Return the newest state of a run, without the optimizer's, its data state, and its step."""
    folder = Path(output) / CHECKPOINT_FOLDER
    with contexts(config), TrainCheckpointer(folder) as checkpointer, warnings_as_lines():
        return checkpointer.restore(abstract_model_state(config, masters=True), allow={"unexpected"})


def rows_of(options: InspectPrecision | InspectSensitivity, config: RunConfig) -> int:
    """Return the number of examples of a batch: those that are given, or of a microbatch of the run."""
    return options.batch_size or config.batch_size // config.microbatches


def batches_of(
    options: InspectPrecision | InspectSensitivity, config: RunConfig, data_state: dict[str, Any], count: int
) -> list[Any]:
    """Return batches of held-out text on the device.

    Args:
        options: options of the command.
        config: configuration of the run.
        data_state: data state of the checkpoint that is inspected.
        count: number of batches.

    Raises:
        ValueError: for batches that exceed the memory, and if the text of the run has changed.
    """
    size = rows_of(options, config)
    # As one step of so many examples, in as many parts as there are batches.
    parts = {"batch_size": size * count, "microbatches": count, "check_memory": options.check_memory}
    command = "inspect precision" if isinstance(options, InspectPrecision) else "inspect sensitivity"
    tokenizer = run_tokenizer(config, Path(options.output))
    objective = run_objective(config, tokenizer)
    check_memory(dataclasses.replace(config, **parts), command, objective)
    data = run_text(config, tokenizer, objective, options.data, remedy=_REMEDY)
    if options.data is None:
        check_text(data, data_state, config.data, before=config.data, remedy=_REMEDY)
    sizes: dict[str, Any] = {"seq_len": config.seq_len, "vocab_size": data.vocab_size, "objective": objective}
    batches = heldout_batches(data.heldout, batch_size=size, num_batches=count, **sizes)
    return [jax.device_put(batch) for batch in batches]
