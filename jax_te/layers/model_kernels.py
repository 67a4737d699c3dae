"""The kernels of a model's layers: which there are, under what names, and stored quantized."""

from __future__ import annotations

import contextlib
from typing import Any

from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers.quantizable import QuantizableModule, RecipeModule
from jax_te.quantize import QuantizedKernel, quantizer_for
from jax_te.recipe import autocast
from jax_te.typing import Array


@checked
def quantizable_modules(model: nnx.Module) -> list[tuple[str, QuantizableModule]]:
    """Return path and module of every layer of ``model`` that a recipe can quantize, in the order of the paths.

    A path is the attribute names and indices that lead to the layer, joined by dots.

    >>> from jax_te.layers import MultiheadAttention
    >>> [path for path, _ in quantizable_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0)))]
    ['proj', 'qkv']
    """
    found = [
        (".".join(map(str, module.layer_path(path))), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
    ]
    return sorted(found, key=lambda item: natural_order(item[0]))


def natural_order(path: str) -> list[tuple[int, str]]:
    """Return a sorting key for paths that orders layer 2 before layer 10.

    >>> sorted(["layers.10", "layers.2"], key=natural_order)
    ['layers.2', 'layers.10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


@checked
def name_modules(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after giving every quantizable layer its path as ``module_name``, for `observe_quantization`.

    >>> from jax_te.layers import MultiheadAttention
    >>> name_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0))).qkv.module_name
    'qkv'
    """
    for path, module in quantizable_modules(model):
        module.module_name = path
    return model


def precision_while_building(config: TransformerConfig, number: int) -> contextlib.AbstractContextManager[Any]:
    """Return the context for building layer ``number``, from 0: without a recipe if it stays in high precision.

    It then has no quantizer state, which no call would update.
    """
    return autocast(None) if config.in_high_precision(number) else contextlib.nullcontext()


@checked
def keep_in_high_precision(model: nnx.Module) -> nnx.Module:
    """Return ``model`` with its layers set to ignore ambient recipes, as if inside ``autocast(None)``.

    A `ModuleRecipe` with ``override_nonquantized_autocast`` still does. Layers of Flax follow recipes from
    `quantize_model` on, so call it afterwards, or give that the rule None for them.

    Raises:
        ValueError: for a model without a layer that follows recipes.

    >>> from jax_te.layers import Linear
    >>> keep_in_high_precision(Linear(16, 16, rngs=nnx.Rngs(0))).high_precision
    True
    """
    following = [module for _, module in nnx.iter_modules(model) if isinstance(module, RecipeModule)]
    if not following:
        raise ValueError(
            f"{type(model).__name__} has no layer that follows recipes, and nothing to keep in high precision. Layers "
            'of Flax follow them from quantize_model on: give that a rule for them, rules={"path.of.layer": None}, or '
            "call keep_in_high_precision afterwards"
        )
    for module in following:
        module.high_precision = True
    return model


def quantizable_kernels(model: nnx.Module) -> list[tuple[tuple[Any, ...], QuantizableModule, str]]:
    """Return path in ``nnx.state(model)``, layer and attribute name of every kernel that a recipe can quantize.

    Layers without a kernel of their own (``skip_weight_param_allocation``) are left out.
    """
    return [
        ((*path, kernel), module, kernel)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
        for kernel in module.kernels
        if getattr(module, kernel) is not None
    ]


class GivesKernels(nnx.Module):
    """Base of modules that pass a kernel to one of their layers in each call: a parameter of their own, or derived from
    one, such as a head's that is tied to the embedding."""

    def given_kernels(self) -> list[tuple[QuantizableModule, str, Array]]:
        """Return the layers that are given a kernel in calls, the kernel's name there and its value."""
        raise NotImplementedError


def given_kernels(model: nnx.Module) -> list[tuple[QuantizableModule, str, Array]]:
    """Return layer, kernel's name and value of every kernel that a `GivesKernels` in ``model`` passes to a layer."""
    givers = [module for _, module in nnx.iter_modules(model) if isinstance(module, GivesKernels)]
    return [kernel for giver in givers for kernel in giver.given_kernels()]


@checked
def quantize_parameters(model: nnx.Module, *, only_marked: bool = False) -> nnx.Module:
    """Return ``model``, its kernels stored quantized by their layers' recipes, in place of fp32 or bf16.

    A kernel then takes about one byte a value (half of one under NVFP4), and no call quantizes it again. Its exact
    value is gone: `jax_te.training.create_train_state` with ``fp8_param=True`` keeps fp32 masters. Kernels of layers
    that run in high precision stay as they are.

    Call it under the recipe, ``with autocast(recipe):``.

    Args:
        model: changed in place.
        only_marked: whether only kernels of layers whose own `ModuleRecipe` sets ``fp8_param`` or ``fp4_param`` are
            meant.

    Raises:
        ValueError: for layers of Flax under `quantize_model`, which hold only plain arrays; without
            ``only_marked`` also where no recipe in use quantizes a kernel, and none is stored quantized.
        QuantizerStateError: for a recipe with state, if a layer was built without it.

    Source: ``transformer_engine.pytorch.quantized_model_init``; Megatron-Core's ``--fp8-param-gather``.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> with autocast(Float8CurrentScaling()):
    ...     layer = quantize_parameters(Linear(32, 16, rngs=nnx.Rngs(0)))
    >>> layer.kernel.get_value().operand.rowwise.data.dtype
    dtype(float8_e4m3fn)
    """
    if not only_marked and any(module.of_flax for _, module in quantizable_modules(model)):
        raise ValueError(
            "layers of Flax hold their kernels as arrays, which cannot be stored quantized: leave fp8_param, or this "
            "call, out, or build the model of jax_te's layers"
        )
    held, stored = False, []  # all before one is set: a kernel that cannot be quantized leaves the model as it was
    for _, module, kernel in quantizable_kernels(model):
        own, value = module.own_recipe(kernel), getattr(module, kernel).get_value()
        if only_marked and (own is None or not own.holds_kernels):
            continue
        if isinstance(value, QuantizedKernel):
            held = True
        elif quantizer_for(module.recipe_of(kernel), "kernel") is not None:
            stored.append((getattr(module, kernel), module.stored_form(kernel)))
    if not (only_marked or held or stored):
        raise ValueError(
            "kernels are to be stored quantized (fp8_param, fp4_param or quantize_parameters), and no layer has a "
            "recipe that quantizes one: make this call, and those of steps, inside `with autocast(recipe):`, or leave "
            "the option or the call out"
        )
    for variable, form in stored:
        variable.set_value(form)
    return model
