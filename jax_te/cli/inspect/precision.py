"""``jax-te inspect precision``: quantization errors of a trained model's tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from jax_te._text import table
from jax_te.cli.build import contexts
from jax_te.cli.inspect.options import InspectPrecision
from jax_te.cli.inspect.report import print_json, print_rules, rules_values
from jax_te.cli.inspect.trained import batches_of, check_saved, newest_state, rows_of, run_and_recipe
from jax_te.cli.module_recipes import layer_recipes, recipe_label
from jax_te.cli.objective import loss_of
from jax_te.cli.precision_rules import apply_rules, quantization_rules, read_rules
from jax_te.metrics import plain_values
from jax_te.recipe import autocast
from jax_te.training import TensorStatistics, calibrate_delayed_scaling, exact_model, inspect_precision

_HEADER = ("module", "tensor", "format", "amax", "scale", "underflow %", "saturation %", "error dB")


def run(options: InspectPrecision) -> int:
    """Return the exit status, 0, once the statistics are on stdout, and their run and step on stderr.

    Raises:
        ValueError: for a folder without a checkpoint, rules that cannot be used, and if no layer is quantized.
    """
    config, recipe = run_and_recipe(options)
    check_saved(options.output)
    state, data_state, step = newest_state(options.output, config)
    print(f"{options.output}, step {step}, recipe {recipe_label(recipe)}", file=sys.stderr, flush=True)
    batch, report = batches_of(options, config, data_state, 1)[0], None
    # Of the step's loss, the share of so many examples: the run's scales are for its gradients.
    loss_scale = state.scaler.scale * (rows_of(options, config) / config.batch_size)
    with contexts(config), autocast(recipe):
        model = exact_model(state)  # with the run's own rules and scales, and kernels as the masters have them
        if options.precision_config is not None:
            rules = quantization_rules(read_rules(options.precision_config), options.factory_modules)
            report = apply_rules(model, rules)
        # The checkpoint's amax histories are those of the layers that the run quantized; others have none yet.
        if recipe is not None and (report is not None or options.recipe is not None):
            calibrate_delayed_scaling(model, loss_of(config), batch, recipe, loss_scale=loss_scale)
        if all(layer.training is None for layer in layer_recipes(model)):
            raise ValueError(
                f"no layer of the run in {options.output} is quantized; see what a --recipe would do to it"
            )
        tensors = inspect_precision(model, loss_of(config), batch, loss_scale=loss_scale)
    if options.json:
        values = [plain_values(tensor) | {"error_db": _finite(tensor.error_db)} for tensor in tensors]
        print_json(recipe, {"step": step, "tensors": values} | rules_values(report))
        return 0
    print_rules(report)
    print(table(_HEADER, [_row(tensor) for tensor in tensors], right=5))
    return 0


def _row(tensor: TensorStatistics) -> Sequence[str]:
    shares = (f"{100.0 * share:.3f}" for share in (tensor.underflow, tensor.saturation))
    scale = f"{tensor.amax:.4g}", f"{tensor.scale:.4g}"
    return (tensor.module, tensor.role, tensor.format, *scale, *shares, f"{tensor.error_db:.1f}")


def _finite(value: float) -> float | None:
    # JSON has no infinity, which a tensor without any error has in decibels.
    return value if math.isfinite(value) else None
