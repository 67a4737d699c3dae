"""``jax-te inspect sensitivity``: the layers of a trained model by the effect of their quantization on gradients."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from jax_te._text import table
from jax_te._whole_files import whole_or_nothing
from jax_te.cli.build import contexts
from jax_te.cli.inspect.options import InspectSensitivity
from jax_te.cli.inspect.report import print_json
from jax_te.cli.inspect.trained import batches_of, check_saved, newest_state, rows_of, run_and_recipe
from jax_te.cli.objective import loss_of
from jax_te.cli.option_table import check_effects
from jax_te.layers import quantizable_modules
from jax_te.training import ModuleSensitivity, exact_model, keep_in_bf16_rules, sensitivity


def run(options: InspectSensitivity) -> int:
    """Return the exit status, 0, once the ranking is on stdout, and its run and step on stderr.

    Raises:
        ValueError: for a folder without a checkpoint, a run without a recipe, and an invalid file or number of layers.
    """
    check_effects(options, {"--keep-bf16": options.keep_bf16 is not None})
    _check_file(options)
    config, recipe = run_and_recipe(options)
    check_saved(options.output)
    if recipe is None:
        raise ValueError(f"the run in {options.output} has --recipe none; give the --recipe to quantize with")
    state, data_state, step = newest_state(options.output, config)
    print(f"{options.output}, step {step}, recipe {recipe.name}", file=sys.stderr, flush=True)
    batches, keep = batches_of(options, config, data_state, options.batches), options.keep_bf16 or 0
    with contexts(config):
        model = exact_model(state)
        layers = len(quantizable_modules(model))
        if keep > layers:
            raise ValueError(f"--keep-bf16 {keep} is more than the model's {layers} layers")
        ranked = sensitivity(
            model,
            loss_of(config),
            batches,
            recipe,
            # Of the step's loss, the share of so many examples, as in `jax-te inspect precision`.
            loss_scale=state.scaler.scale * (rows_of(options, config) / config.batch_size),
            wrt=nnx.Param if config.lora_rank is None else nnx.LoRAParam,
        )
    kept = [layer.module for layer in ranked if layer.has_rules][:keep]
    if options.write is not None:
        note = f"# The {keep} of {layers} layers whose quantization under {recipe.name} changes the gradients most,\n"
        note += f"# by jax-te inspect sensitivity at step {step}.\n"
        with whole_or_nothing(Path(options.write).parent) as new:
            new.part(Path(options.write).name).write_text(note + keep_in_bf16_rules(kept), encoding="utf-8")
    if options.json:
        modules = [dataclasses.asdict(layer) for layer in ranked]
        print_json(recipe, {"step": step, "batches": len(batches), "modules": modules, "keep_bf16": kept})
        return 0
    rows = [_row(layer, kept=layer.module in kept) for layer in ranked]
    print(table(("module", "class", "keep", "gradient error", "loss increase"), rows, right=2))
    if not all(layer.has_rules for layer in ranked):
        print("A precision file cannot keep a core of attention in bf16: a recipe without fp8_dpa keeps all of them.")
    if options.write is not None:
        print(f"{options.write}: use it with jax-te train --precision-config {options.write}", file=sys.stderr)
    return 0


def _check_file(options: InspectSensitivity) -> None:
    """Raise ValueError for a ``--write`` that could not be written, before the passes for every layer."""
    if options.write is not None and Path(options.write).exists():
        raise ValueError(f"--write {options.write} exists; give another name, or delete it")


def _row(layer: ModuleSensitivity, *, kept: bool) -> Sequence[str]:
    keep = "bf16" if kept else ""
    return (layer.module, layer.kind, keep, f"{layer.gradient_error:.4g}", f"{layer.loss_increase:+.3g}")
