"""``jax-te inspect``: what quantization does to a trained model's tensors, and how arrays are split and saved."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import abstract_model, abstract_model_state, contexts, loss_fn, warnings_as_lines
from jax_te.cli.inspect_checkpoint import show_checkpoint
from jax_te.cli.inspect_communication import show_communication
from jax_te.cli.inspect_sharding import show_sharding
from jax_te.cli.memory import check_memory
from jax_te.cli.module_recipes import layer_recipes, recipe_label
from jax_te.cli.options import OPTIONS
from jax_te.cli.precision_rules import apply_rules, quantization_rules, read_rules
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CHECKPOINT_FOLDER, holds_run, read_config
from jax_te.cli.run_text import run_text, run_tokenizer
from jax_te.cli.table import table
from jax_te.data import heldout_batches
from jax_te.layers import quantizable_modules
from jax_te.megatron import QuantizationReport
from jax_te.metrics.internal import plain_values
from jax_te.recipe import Recipe, autocast, recipe_from_name
from jax_te.training import (
    ModuleSensitivity,
    TensorStatistics,
    TrainState,
    calibrate_delayed_scaling,
    exact_model,
    inspect_precision,
    keep_in_bf16_rules,
    sensitivity,
)

SENSITIVITY_BATCHES = 2


def run(options: argparse.Namespace) -> int:
    """Return the exit status, 0, once the report is on stdout, and the run and step that it is of on stderr.

    Raises:
        ValueError: for options that do not go together, a folder without a run, and nothing to inspect.
    """
    if options.checkpoint is not None:
        return show_checkpoint(options)
    _check_options(options)
    if options.sharding:
        return show_sharding(options)
    if options.communication:
        return show_communication(options)
    output = Path(options.output)
    config = read_config(output)
    if config is None:
        raise ValueError(f"{output} holds no run; train one with: jax-te train --output {output}")
    # One device and whatever kernels there are, wherever it was trained.
    config = config.on_one_device(options.factory_modules)
    recipe = config.make_recipe() if options.recipe is None else recipe_from_name(options.recipe)
    if options.recipes:
        return _show_recipes(options, config, recipe)
    if not holds_run(output):
        raise ValueError(f"{output} has saved no checkpoint yet; let its run go on: jax-te train --output {output}")
    if options.sensitivity and recipe is None:
        raise ValueError(f"the run in {output} has --recipe none; give the --recipe to quantize with")
    with contexts(config), TrainCheckpointer(output / CHECKPOINT_FOLDER) as checkpointer, warnings_as_lines():
        wanted = abstract_model_state(config, masters=True)
        state, _, step = checkpointer.restore(wanted, allow={"unexpected"})
    print(f"{output}, step {step}, recipe {recipe_label(recipe)}", file=sys.stderr, flush=True)
    if options.sensitivity:
        assert recipe is not None
        return _show_sensitivity(options, config, state, recipe, step)
    return _show_statistics(options, config, state, recipe, step)


def _check_options(options: argparse.Namespace) -> None:
    for report in ("sharding", "communication"):
        # Arrays have the same axes under every recipe and for any text.
        others = ("recipes", "sensitivity", "recipe", "precision_config", "data", "batch_size", "batches", "keep_bf16")
        for name in (*others, "write", *(("communication",) if report == "sharding" else ())):
            if getattr(options, report) and getattr(options, name):
                remedy = " (--train-options may have it)" if options.communication and name in OPTIONS else ""
                raise ValueError(f"--{report} computes nothing, so leave --{name.replace('_', '-')} out{remedy}")
    if options.recipes and options.sensitivity:
        raise ValueError("--recipes and --sensitivity are two different reports; give one of them")
    if options.sensitivity and options.precision_config is not None:
        raise ValueError("--sensitivity quantizes every layer alone, whatever its rules; leave --precision-config out")
    needed = {"batches": "sensitivity", "keep_bf16": "sensitivity", "write": "keep_bf16"}
    needed |= {"network": "communication", "train_options": "communication"}
    for name in ("mesh", "preset"):
        if getattr(options, name) is not None and not (options.sharding or options.communication):
            raise ValueError(f"--{name} is for --sharding and --communication; give one of them, too")
    for name, other in needed.items():
        if getattr(options, name) is not None and not getattr(options, other):
            raise ValueError(f"--{name.replace('_', '-')} is for --{other.replace('_', '-')}; give that too")
    if options.recipes:
        for name in ("data", "batch_size"):
            if getattr(options, name) is not None:
                raise ValueError(f"--recipes computes nothing, so --{name.replace('_', '-')} has no effect there")
    # Checked before the measurement, which takes a pass for every layer.
    if options.write is not None and Path(options.write).exists():
        raise ValueError(f"--write {options.write} exists; give another name, or delete it")


def _show_recipes(options: argparse.Namespace, config: RunConfig, recipe: Recipe | None) -> int:
    file = options.precision_config
    rules = config.precision_config if file is None else read_rules(file)  # a run keeps the text of its file
    with contexts(config), autocast(recipe):
        model = abstract_model(config)
        report = None if rules is None else apply_rules(model, quantization_rules(rules, options.factory_modules))
        layers = layer_recipes(model)
    rows = [(r.module, r.kind, recipe_label(r.training), recipe_label(r.evaluation), r.why) for r in layers]
    if options.json:
        names = ("module", "kind", "training", "evaluation", "why")
        modules = [dict(zip(names, row, strict=True)) for row in rows]
        return _print_json(recipe, {"modules": modules} | _report_values(report))
    _print_report(report)
    print(table(("module", "class", "training", "evaluation", "why"), rows))
    return 0


def _show_statistics(
    options: argparse.Namespace, config: RunConfig, state: TrainState, recipe: Recipe | None, step: int
) -> int:
    batch, report = _batches(options, config, 1)[0], None
    with contexts(config), autocast(recipe):
        model = exact_model(state)  # with the run's own rules and scales, and kernels as the masters have them
        if options.precision_config is not None:
            rules = quantization_rules(read_rules(options.precision_config), options.factory_modules)
            report = apply_rules(model, rules)
        # The checkpoint's amax histories are those of the layers that the run quantized; others have none yet.
        if recipe is not None and (report is not None or options.recipe is not None):
            calibrate_delayed_scaling(model, loss_fn, batch, recipe)
        if all(layer.training is None for layer in layer_recipes(model)):
            raise ValueError(
                f"no layer of the run in {options.output} is quantized; see what a --recipe would do to it"
            )
        found = inspect_precision(model, loss_fn, batch, loss_scale=state.scaler.scale)
    if options.json:
        tensors = [plain_values(tensor) | {"error_db": _finite(tensor.error_db)} for tensor in found]
        return _print_json(recipe, {"step": step, "tensors": tensors} | _report_values(report))
    _print_report(report)
    header = ("module", "tensor", "format", "amax", "scale", "underflow %", "saturation %", "error dB")
    print(table(header, [_statistics_row(tensor) for tensor in found], right=5))
    return 0


def _show_sensitivity(
    options: argparse.Namespace, config: RunConfig, state: TrainState, recipe: Recipe, step: int
) -> int:
    batches = _batches(options, config, options.batches or SENSITIVITY_BATCHES)
    keep = options.keep_bf16 or 0
    with contexts(config):
        model = exact_model(state)
        layers = len(quantizable_modules(model))
        if keep > layers:
            raise ValueError(f"--keep-bf16 {keep} is more than the model's {layers} layers")
        found = sensitivity(model, loss_fn, batches, recipe)
    kept = [layer.module for layer in found[:keep]]
    if options.write is not None:
        note = f"# The {keep} of {layers} layers whose quantization under {recipe.name} changes the gradients most,\n"
        note += f"# by jax-te inspect --sensitivity at step {step}.\n"
        Path(options.write).write_text(note + keep_in_bf16_rules(kept), encoding="utf-8")
    if options.json:
        modules = [dataclasses.asdict(layer) for layer in found]
        return _print_json(recipe, {"step": step, "batches": len(batches), "modules": modules, "keep_bf16": kept})
    rows = [_sensitivity_row(layer, kept=layer.module in kept) for layer in found]
    print(table(("module", "class", "keep", "gradient error", "loss increase"), rows, right=2))
    if options.write is not None:
        print(f"{options.write}: use it with jax-te train --precision-config {options.write}", file=sys.stderr)
    return 0


def _batches(options: argparse.Namespace, config: RunConfig, count: int) -> list[Any]:
    """Return batches of held-out text on the device."""
    size = options.batch_size or config.batch_size // config.microbatches
    # As one step of so many examples, in as many parts as there are batches.
    parts = {"batch_size": size * count, "microbatches": count, "check_memory": options.check_memory}
    check_memory(dataclasses.replace(config, **parts))
    data = run_text(config, run_tokenizer(config, Path(options.output)), options.data)
    sizes: dict[str, Any] = {"seq_len": config.seq_len, "vocab_size": data.vocab_size}
    batches = heldout_batches(data.heldout, batch_size=size, num_batches=count, **sizes)
    return [jax.device_put(batch) for batch in batches]


def _statistics_row(tensor: TensorStatistics) -> Sequence[str]:
    shares = (f"{100.0 * share:.3f}" for share in (tensor.underflow, tensor.saturation))
    scale = f"{tensor.amax:.4g}", f"{tensor.scale:.4g}"
    return (tensor.module, tensor.role, tensor.format, *scale, *shares, f"{tensor.error_db:.1f}")


def _sensitivity_row(layer: ModuleSensitivity, *, kept: bool) -> Sequence[str]:
    keep = "bf16" if kept else ""
    return (layer.module, layer.kind, keep, f"{layer.gradient_error:.4g}", f"{layer.loss_increase:+.3g}")


def _print_report(report: QuantizationReport | None) -> None:
    if report is not None:
        print(f"{report}\n")


def _report_values(report: QuantizationReport | None) -> dict[str, Any]:
    """Return a report as JSON can hold it."""
    if report is None:
        return {}
    rules = [{"module": m.path, "matcher": m.matcher, "config": m.config_key} for m in report.modules]
    idle = ("unused_matchers", "shadowed_matchers", "disabled_matchers", "unused_configs")
    return {"rules": rules} | {name: list(getattr(report, name)) for name in idle}


def _print_json(recipe: Recipe | None, values: dict[str, Any]) -> int:
    print(json.dumps({"recipe": None if recipe is None else recipe.name} | values, indent=2))
    return 0


def _finite(value: float) -> float | None:
    # JSON has no infinity, which a tensor without any error has in decibels.
    return value if math.isfinite(value) else None
