"""From what was typed to a `RunConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax

from jax_te.cli.presets import PRESETS
from jax_te.training.run_config import RunConfig, check_resumable, read_config

_FIELDS = {field.name for field in dataclasses.fields(RunConfig)}
_DELAYED = {"amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0}


def output_folder(options: argparse.Namespace) -> Path:
    """``--output``, or ``runs/PRESET``, with the recipe's name behind it if there is one."""
    if hasattr(options, "output"):
        return Path(options.output)
    preset, recipe = getattr(options, "preset", "tiny"), getattr(options, "recipe", "none")
    return Path("runs") / (preset if recipe == "none" else f"{preset}-{recipe}")


def resolve(options: argparse.Namespace, output: Path) -> tuple[RunConfig, bool]:
    """The run's configuration, and whether ``output`` holds that run already.

    An option that is not given has the value of the run in ``output``; in a new folder, its preset's value or its default.

    Raises:
        ValueError: if the folder holds another run, or the values do not go together.
    """
    given = {name: value for name, value in vars(options).items() if name in _FIELDS}
    if "data" in given:
        given["data"] = os.path.abspath(given["data"])
    saved = read_config(output)
    if saved is None:
        return _new_config(given), False
    check_resumable(saved, given, output)
    return dataclasses.replace(saved, **given), True


def _new_config(given: dict[str, Any]) -> RunConfig:
    name = given.get("preset", "tiny")
    values = {"preset": name} | PRESETS[name].values | given
    if "num_heads" in given:
        values["num_query_groups"] = given.get("num_query_groups", given["num_heads"])
    if "hidden_size" in given:
        values["ffn_hidden_size"] = given.get("ffn_hidden_size", 4 * given["hidden_size"])
    steps = values["steps"]
    if "warmup_steps" not in given:
        values["warmup_steps"] = min(values["warmup_steps"], steps // 10)
    values.setdefault("decay_steps", steps)
    values.setdefault("min_learning_rate", values["learning_rate"] / 10)
    values.setdefault("params_dtype", "bfloat16" if jax.default_backend() == "gpu" else "float32")
    values.setdefault("compute_dtype", values["params_dtype"])
    recipe = values.get("recipe", "none")
    if recipe != "none":
        values.setdefault("fp8_format", "hybrid")
    if recipe == "delayed":
        values = _DELAYED | values
    return RunConfig(**values)
