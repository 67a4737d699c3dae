"""Resolution of the given options to a `RunConfig`: the run in the folder, presets and defaults supply the rest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jax_te._device import default_platform
from jax_te.cli.checkpoint_kind import refuse_models
from jax_te.cli.model_config import described_values, read_model_config
from jax_te.cli.option_table import check_effects
from jax_te.cli.options import EXPERT_RANKS, RULES, SELECTIVE, SOFTMAX, TENSOR_RANKS, GivenOptions
from jax_te.cli.precision_rules import read_rules
from jax_te.cli.presets import PRESETS
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CONFIG_FILE, KEPT, check_resumable, holds_run, read_config
from jax_te.cli.run_text import tokenizer_values
from jax_te.config import ParallelConfig
from jax_te.interop.huggingface import CONFIG
from jax_te.recipe import GEMMS

DEFAULT_PRESET = "tiny"


def output_folder(options: GivenOptions) -> Path:
    """Return ``--output``, or ``runs/`` and the name of the preset or the described model, and the recipe's if any.

    Raises:
        ValueError: if it is a file.
    """
    name, recipe = _model_name(options.given), options.given.get("recipe", "none")
    default = Path("runs") / (name if recipe == "none" else f"{name}-{recipe}")
    output = default if options.start.output is None else Path(options.start.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; give a folder")
    return output


def _model_name(given: Mapping[str, Any]) -> str:
    """Return the name of the folder, or of the preset, that says what the model is."""
    if "init_from" in given:
        return Path(os.path.abspath(given["init_from"])).name
    if "model_config" in given:
        place = Path(os.path.abspath(given["model_config"]))
        folder = place.parent if place.name == CONFIG else place
        return folder.name.removesuffix(".json")
    return given.get("preset", DEFAULT_PRESET)


def resolve(options: GivenOptions, output: Path) -> tuple[RunConfig, bool]:
    """Return the run's configuration, and whether ``output`` holds checkpoints of it.

    An option that is not given has the value of the run there; in a new run, its preset's value or its default. Of a
    start that ended before its first checkpoint nothing is kept, unless no options are given: then it starts again.

    Raises:
        ValueError: if the folder holds another run or a model, or the values conflict.
    """
    given = _with_contents(options.given)
    resumes = holds_run(output)
    if not resumes:
        refuse_models(output)  # before its config.json, which may be that model's, is read as a run's
    saved = read_config(output)
    if not resumes:
        # Not the saved values where some are given: its steps, for example, decided its warm-up and decay.
        if saved is None or KEPT.intersection(given):
            return new_config(given), False
        return _changed(saved, given), False
    if saved is None:
        raise ValueError(
            f"{output} has checkpoints but no {CONFIG_FILE}, so they cannot be resumed; give another --output"
        )
    check_resumable(saved, given, output)
    return _changed(saved, given), True


def _with_contents(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options with absolute paths, and with the contents of files in place of their names.

    So a resume may be started in another folder, and a run keeps its rules and its model even if a file changes.
    """
    paths = {name: os.path.abspath(given[name]) for name in ("data", "tokenizer", "init_from") if name in given}
    read: dict[str, Any] = {**given, **paths}
    if "tokenizer" in read:
        found = tokenizer_values(read["tokenizer"], None)
        read |= {name: found[name] for name in ("tokenizer_sha256", "end_of_text")}
    if "precision_config" in read:
        read["precision_config"] = read_rules(read["precision_config"])
    if "model_config" in read:
        read["model_config"] = read_model_config(read["model_config"])
    return read


def _changed(saved: RunConfig, given: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run with the options that are given."""
    config = dataclasses.replace(saved, **given)
    check_given(config, given)
    return config


def check_given(config: RunConfig, given: Collection[str]) -> None:
    """Raise ValueError for options that are given and have no effect in their run.

    `RunConfig` itself refuses those that contradict others. These are harmless in a run that was saved with them, on
    another mesh.
    """
    mesh = config.parallel_config() or ParallelConfig()
    met = {
        EXPERT_RANKS: mesh.expert > 1,
        SOFTMAX: config.moe_router_score_function == "softmax",
        SELECTIVE: config.recompute_granularity == "selective",
        TENSOR_RANKS: mesh.tensor > 1,
        RULES: config.precision_config is not None,
    }
    check_effects(config, met, given)
    if {"recipe", "override_linear_precision", "fp8_dpa"} & set(given):
        _check_recipe_has_gemms(config)


def _check_recipe_has_gemms(config: RunConfig) -> None:
    """Raise ValueError for a recipe from which ``--override-linear-precision`` takes all that it quantizes."""
    kept = set((config.override_linear_precision or "").split(","))
    if config.precision_config is None and kept.issuperset(GEMMS) and not config.fp8_dpa:
        raise ValueError(
            f"--override-linear-precision {config.override_linear_precision} leaves no GEMM to --recipe "
            f"{config.recipe}; name fewer, or use --recipe none"
        )


def new_config(given: dict[str, Any]) -> RunConfig:
    """Return the configuration of a new run from the options that are given; others are its preset's or defaults."""
    preset, described = given.get("preset", DEFAULT_PRESET), described_values(given)
    values = {"preset": preset} | PRESETS[preset].values | described | given
    if "tokenizer" in values:
        values |= tokenizer_values(values["tokenizer"], described.get("vocab_size"))
    values |= _following_sizes(given)
    _fill_schedule(values, given)
    _fill_dtypes(values)
    config = RunConfig(**values)
    check_given(config, given)
    return config


def _following_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes that follow from a given one: the preset's would not fit it."""
    sizes: dict[str, Any] = {}
    if "num_heads" in given:
        sizes["num_query_groups"] = given.get("num_query_groups", given["num_heads"])
    if "hidden_size" in given:
        sizes["ffn_hidden_size"] = given.get("ffn_hidden_size", 4 * given["hidden_size"])
    return sizes


def _fill_schedule(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in the fields of the learning rate's schedule that follow from the number of steps and the rate."""
    if "warmup_steps" not in given:
        values["warmup_steps"] = min(values["warmup_steps"], values["steps"] // 10)
    values.setdefault("decay_steps", values["steps"])
    values.setdefault("min_learning_rate", values["learning_rate"] / 10)


def _fill_dtypes(values: dict[str, Any]) -> None:
    """Fill in dtypes that neither the preset nor the given options have."""
    # A CPU emulates bf16, at a fraction of the speed of fp32.
    values.setdefault("params_dtype", "bfloat16" if default_platform() == "gpu" else "float32")
    values.setdefault("compute_dtype", values["params_dtype"])
