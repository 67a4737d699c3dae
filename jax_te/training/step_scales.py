"""Scales of delayed scaling that a step computes for all linear layers at once, before they run."""

from __future__ import annotations

from flax import nnx

from jax_te.layers import QuantizableModule
from jax_te.quantize import StepScales, precision_of, with_step_scales
from jax_te.recipe import current_recipe


def compute_step_scales(model: nnx.Module, quantizers: nnx.State) -> tuple[StepScales, nnx.State]:
    """Return a description of the scales, for `jax_te.quantize.within_step`, and the model's states with them.

    They are those of the ambient recipe. Layers under another one compute theirs when they are called.
    """
    scales = precision_of(current_recipe()).step_scales
    if scales.rule is None:
        return scales, quantizers
    others = frozenset(
        (*path, attribute)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
        for kernel, attribute in module.kernels.items()
        if precision_of(module.recipe_of(kernel)).step_scales != scales
    )
    return scales, with_step_scales(quantizers, scales, without=others)
