"""The effect of quantizing each layer alone on a model's loss and gradients, and rules that keep the worst in bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import yaml
from flax import nnx

from jax_te._validation import checked
from jax_te.layers import (
    DotProductAttention,
    QuantizableModule,
    RecipeModule,
    aux_losses_scaled,
    natural_order,
    quantizable_kernels,
    set_grad_sinks,
)
from jax_te.megatron import TE_CONFIG_TYPE_KEY
from jax_te.quantize import QuantizedKernel, frozen_scales
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import batch_axes, constrain
from jax_te.training.global_batch import check_global
from jax_te.training.inspection import calibrate_delayed_scaling
from jax_te.training.loss import LossFn, mean_loss
from jax_te.training.state import split_model
from jax_te.typing import Array, PyTree

Measure = Callable[[PyTree, PyTree], tuple[Array, PyTree]]


@dataclass(frozen=True, kw_only=True)
class ModuleSensitivity:
    """The effect of quantizing one layer and no other.

    Args:
        module: path of the layer, or of a core of attention.
        kind: name of its class.
        loss_increase: the mean loss with this layer quantized, minus the mean loss with nothing quantized.
        gradient_error: ``|g - g0| / |g0|`` over all batches, with ``g`` and ``g0`` the gradients of the trained
            parameters with this layer quantized and with nothing quantized.
        has_rules: whether a precision file can name the layer. It cannot name a core of attention, which is quantized
            by the recipe's ``fp8_dpa`` alone.
    """

    module: str
    kind: str
    loss_increase: float
    gradient_error: float
    has_rules: bool = True


@checked
def sensitivity(
    model: nnx.Module,
    loss_fn: LossFn,
    batches: Sequence[PyTree],
    recipe: Recipe,
    *,
    loss_scale: float | Array = 1.0,
    wrt: Any = nnx.Param,
) -> list[ModuleSensitivity]:
    """Return the layers ranked by how much quantizing each of them alone changes the gradient, worst first.

    Layers' own recipes are ignored: every layer runs under ``recipe`` or in high precision. Cores of attention are
    among the layers under a recipe with ``fp8_dpa``. One program is compiled, with a switch for each layer; it runs
    once for each layer and batch. Delayed scaling is calibrated on the first batch, see `calibrate_delayed_scaling`.

    The gradient's error is the better signal: it is never negative, and clearly above 0 even where rounding hides the
    loss's difference. The loss's increase shows whether the ranking matters at all.

    Args:
        model: model to measure; it is not changed. Gradients of kernels are computed in fp32, those of other parameters
            in their dtype.
        loss_fn: ``(model, batch, key) -> [ ]``; its key is None, and layers drop nothing.
        batches: batches, at least one.
        recipe: the recipe to quantize with.
        loss_scale: factor of the loss, as in fp16 training, whose small gradients are zero without it.
        wrt: filter of the parameters that are trained; with adapters ``nnx.LoRAParam``.

    Raises:
        TypeError: if ``recipe`` is None.
        ValueError: without batches, or for batches that are not global on a mesh of several processes; for a ``wrt``
            that fits no parameter; if no layer can be quantized, or kernels are stored quantized (see `exact_model`).

    >>> from jax_te.layers import MultiheadAttention
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> model = MultiheadAttention(32, 2, rngs=nnx.Rngs(0))
    >>> batch = jax.random.normal(jax.random.key(0), (2, 16, 32))
    >>> layers = sensitivity(model, lambda model, x, key: jnp.mean(model(x) ** 2), [batch], Float8CurrentScaling())
    >>> sorted(layer.module for layer in layers), 0.0 < layers[-1].gradient_error <= layers[0].gradient_error
    (['proj', 'qkv'], True)
    """
    if not batches:
        raise ValueError("sensitivity needs at least one batch, got none")
    model = _plain_copy(model)
    check_global(list(batches), nnx.state(model, nnx.Param))
    calibrate_delayed_scaling(model, loss_fn, batches[0], recipe, loss_scale=loss_scale)
    layers = _quantized_layers(model, recipe)
    measure, off = _switched_measure(model, loss_fn, layers, jnp.float32(loss_scale), wrt)
    totals, norm = {path: [0.0, 0.0] for path in layers}, 0.0
    # All measurements use the calibrated scales, so that they differ only in the layer.
    with autocast(recipe), frozen_scales():
        for batch in batches:
            loss0, gradient0 = measure(off, batch)
            norm += float(_squared_norm(gradient0))
            for path, total in totals.items():
                loss, gradient = measure(_turned_on(off, layers[path].path), batch)
                total[0] += float(loss) - float(loss0)
                total[1] += float(_squared_distance(gradient, gradient0))
    found = [
        ModuleSensitivity(
            module=path,
            kind=layers[path].kind,
            has_rules=layers[path].has_rules,
            loss_increase=increase / len(batches),
            gradient_error=(distance / norm) ** 0.5 if norm > 0.0 else float("nan"),
        )
        for path, (increase, distance) in totals.items()
    ]
    return sorted(found, key=lambda layer: -layer.gradient_error)


@checked
def keep_in_bf16_rules(modules: Sequence[str]) -> str:
    """Return a precision file that keeps these layers in high precision and leaves the others to the ambient recipe.

    Args:
        modules: paths of layers, at least one; of those that have rules, see `ModuleSensitivity`.

    Returns:
        YAML as `jax_te.megatron.load_quantization_recipe` reads it.

    Raises:
        ValueError: for no path.

    >>> print(keep_in_bf16_rules(["layers.0.layernorm_mlp"]))
    configs:
      bf16:
        transformer_engine_config_type: TEQuantizationParams
        training_recipe: {}
    matchers:
      layers.0.layernorm_mlp:
        enabled: true
        type: glob
        pattern: layers.0.layernorm_mlp
        config: bf16
    <BLANKLINE>
    """
    if not modules:
        raise ValueError("modules must have the path of at least one layer")
    payload = {TE_CONFIG_TYPE_KEY: "TEQuantizationParams", "training_recipe": {}}
    rules = {path: {"enabled": True, "type": "glob", "pattern": path, "config": "bf16"} for path in modules}
    return yaml.safe_dump({"configs": {"bf16": payload}, "matchers": rules}, sort_keys=False)


class _Switch(nnx.Variable):
    """Whether a layer is quantized, bool ``[]``: an input of the compiled program."""


@functools.cache
def _switched(kind: type) -> type:
    """Return the layer class with a switch, an input of the program, that decides whether its calls are quantized."""

    class Switched(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def quantized() -> Any:
                return kind.__call__(self, *args, **kwargs)

            def plain() -> Any:
                with autocast(None):
                    return kind.__call__(self, *args, **kwargs)

            # lax.cond, not two programs: one is compiled for all layers instead of one for each.
            return jax.lax.cond(self.switch[...], quantized, plain)

    return Switched


def _plain_copy(model: nnx.Module) -> Any:
    """Return a copy of the model whose layers have no recipes of their own."""
    graphdef, params, quantizers, rest = split_model(model)
    if any(isinstance(variable.get_value(), QuantizedKernel) for _, variable in nnx.to_flat_state(params)):
        raise ValueError(
            "the model holds quantized kernels, which cannot be computed without their quantization; give "
            "exact_model(state), which takes the fp32 masters"
        )
    copy: Any = nnx.merge(graphdef, params, quantizers, rest, copy=True)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, RecipeModule):
            module.high_precision = False
        if isinstance(module, QuantizableModule):
            module.module_recipe, module.kernel_recipes = None, ()
    return copy


class _Layer(NamedTuple):
    """A module that a recipe quantizes.

    Args:
        module: the module.
        kind: name of its class.
        path: path of the module, which for a layer of Flax is inside of it.
        has_rules: see `ModuleSensitivity`.
    """

    module: Any
    kind: str
    path: tuple[str, ...]
    has_rules: bool


def _quantized_layers(model: nnx.Module, recipe: Recipe) -> dict[str, _Layer]:
    """Return the modules that a recipe quantizes by the paths of their layers, in the order of these."""
    found = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, QuantizableModule):
            layer, has_rules = module.layer_path(path), True
        elif isinstance(module, DotProductAttention) and recipe.quantizes_attention:
            layer, has_rules = path, False
        else:
            continue
        name = ".".join(map(str, layer))
        found[name] = _Layer(module, type(module).__name__, tuple(map(str, path)), has_rules)
    return {path: found[path] for path in sorted(found, key=natural_order)}


def _switched_measure(
    model: Any, loss_fn: LossFn, layers: dict[str, _Layer], loss_scale: Array, wrt: Any
) -> tuple[Measure, nnx.State]:
    """Return ``measure(switches, batch) -> (loss, gradients)``, and the switches, all off, that the layers get.

    The gradients are those of the scaled loss.
    """
    for module in [layer.module for layer in layers.values()]:
        kind: Any = type(module)
        # A subclass, not a module around it, so that the paths of parameters and rules do not change.
        module.__class__ = _switched(kind)
        setattr(module, "switch", _Switch(jnp.zeros((), bool)))  # noqa: B010 - an attribute of the class given above
    graphdef, switches, params, rest = nnx.split(model, _Switch, wrt, ...)
    trained = dict(nnx.to_flat_state(params))
    if not trained:
        raise ValueError(f"wrt={wrt!r} fits no parameter of the model; without adapters leave it out")
    kernels = {path: trained[path].get_value() for path, *_ in quantizable_kernels(model) if path in trained}
    # Gradients of bf16 kernels would be rounded to bf16, which hides small effects of quantization.
    low = {path: kernel for path, kernel in kernels.items() if kernel.dtype != jnp.float32}
    sinks = {path: jnp.zeros_like(kernel, jnp.float32) for path, kernel in low.items()}

    @jax.jit
    def run(
        switches: PyTree, params: PyTree, rest: PyTree, sinks: PyTree, batch: PyTree, scale: Array
    ) -> tuple[Array, PyTree]:
        batch = jax.tree.map(lambda leaf: constrain(leaf, batch_axes(leaf.ndim)), batch)

        def scaled_loss(params: PyTree, sinks: dict[Any, Array]) -> tuple[Array, Array]:
            model = nnx.merge(graphdef, switches, params, rest, copy=True)
            # Noise of dropout would hide small errors.
            model.set_attributes(without_dropout=True, raise_if_not_found=False)
            set_grad_sinks(model, sinks)
            with aux_losses_scaled(model, scale):
                loss = mean_loss(loss_fn(model, batch, None))
            return loss * scale, loss

        (_, loss), gradients = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)(params, sinks)
        return loss, gradients

    return lambda switches, batch: run(switches, params, rest, sinks, batch, loss_scale), switches


def _turned_on(switches: nnx.State, path: tuple[str, ...]) -> nnx.State:
    """Return switches of which that of the module at a path alone is on."""
    # Only values change, so the program is not compiled again.
    flat = [
        (of_switch, variable.replace(jnp.asarray(tuple(map(str, of_switch[:-1])) == path)))
        for of_switch, variable in nnx.to_flat_state(switches)
    ]
    return nnx.from_flat_state(flat)


def _squared_norm(tree: PyTree) -> Array:
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)), jnp.float32(0.0))


@jax.jit
def _squared_distance(one: PyTree, other: PyTree) -> Array:
    wide = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (one, other))
    return _squared_norm(jax.tree.map(jnp.subtract, *wide))
