"""Applying a quantization file to all quantizable layers of a model, and a report of the result."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from flax import nnx

from jax_te._text import table
from jax_te._validation import checked
from jax_te.layers import QuantizableModule, quantizable_modules
from jax_te.megatron.float16 import Float16Module
from jax_te.megatron.quantization.gemm_paths import kernel_paths
from jax_te.megatron.quantization.layer_precision import own_recipe
from jax_te.megatron.quantization.rules import RecipeConfig, get_quant_config_or_none, match_context
from jax_te.recipe import ModuleRecipe, Recipe

_logger = logging.getLogger(__name__)

_HEADER = ("module", "class", "matcher", "config", "training", "evaluation", "active when")
_ACTS = {
    (True, True): "everywhere",
    (True, False): "quantized",
    (False, True): "not quantized",
    (False, False): "never",
}


@dataclass(frozen=True)
class ModuleQuantization:
    """Precision of one quantizable layer.

    Args:
        path: dotted path of the layer; with the kernel's name if another rule applies to its other kernel.
        kind: name of its class.
        matcher: label of the rule that applied, or None.
        config_key: name of the config that the rule gave, or None.
        module_recipe: the layer's ``module_recipe``; None: the layer follows the ambient recipe.
    """

    path: str
    kind: str
    matcher: str | None
    config_key: str | None
    module_recipe: ModuleRecipe | None


@dataclass(frozen=True)
class QuantizationReport:
    """Result of `apply_quantization_config`; as text, a table.

    The last column of the table is the ambient state in which a layer's recipe takes effect. The default is
    "quantized": only under an ambient recipe (``override_quantized_autocast``, ``override_nonquantized_autocast``).

    Args:
        modules: all quantizable layers, in the order of the model's layers.
        unused_matchers: rules that match no quantizable layer's path.
        shadowed_matchers: rules that match some paths, to each of which an earlier rule applied.
        disabled_matchers: rules that are not enabled.
        unused_configs: configs that no layer received.
    """

    modules: tuple[ModuleQuantization, ...]
    unused_matchers: tuple[str, ...] = ()
    shadowed_matchers: tuple[str, ...] = ()
    disabled_matchers: tuple[str, ...] = ()
    unused_configs: tuple[str, ...] = ()

    @property
    def ambient(self) -> tuple[str, ...]:
        """Paths of the layers that follow the ambient recipe."""
        return tuple(module.path for module in self.modules if module.module_recipe is None)

    def without_effect(self) -> dict[str, tuple[str, ...]]:
        """Return the rules and configs without effect, by the reason for it; a reason without any is left out.

        >>> QuantizationReport(modules=(), unused_matchers=("lm_head",)).without_effect()
        {'rules that fit no layer': ('lm_head',)}
        """
        reasons = {
            "rules that fit no layer": self.unused_matchers,
            "rules behind an earlier one": self.shadowed_matchers,
            "rules not enabled": self.disabled_matchers,
            "configs that no layer got": self.unused_configs,
        }
        return {reason: names for reason, names in reasons.items() if names}

    def __str__(self) -> str:
        notes = self.without_effect()
        if self.ambient:
            notes["layers left to the ambient recipe"] = self.ambient
        modules = table(_HEADER, [_row(module) for module in self.modules])
        return "\n".join([modules, *(f"{note}: {', '.join(names)}" for note, names in notes.items())])


@checked
def apply_quantization_config(model: nnx.Module, recipe_config: RecipeConfig | None) -> QuantizationReport:
    """Give every quantizable layer the precision of the first rule that matches its path.

    A path consists of the attribute names and list indices that lead to a layer: ``layers.0.self_attention.qkv``. A
    `Float16Module` around the model adds nothing to it. A rule may also name Megatron's path of the same GEMM
    (``decoder.layers.0.self_attention.linear_qkv``), and one kernel of a LayerNormMLP, by its path
    (``layers.0.layernorm_mlp.wo_kernel``) or Megatron's (``decoder.layers.0.mlp.linear_fc2``). A LayerNormMLP whose
    kernels are under different rules runs unfused. `jax_te.layers.quantizable_modules` lists a model's paths.

    Rules that match no path are logged as a warning. Where `run_layers` scans a stack, a layer whose rules differ from
    its neighbours' runs outside of the loop.

    Layers to which no rule applies lose the recipe that they had and follow the ambient one, as after Megatron's walk
    with ``finish_init``.

    Args:
        model: changed in place. Its layers' recipes are static: call this before jitting, or jitted functions are
            traced again.
        recipe_config: result of `load_quantization_recipe`. None removes all layers' own recipes.

    Returns:
        The precision of each layer, and the entries of the file that had no effect; print it.

    Raises:
        ValueError: if the model has no quantizable layer; see also `finish_init`.
        KeyError: if a rule that applies names a config that does not exist.
        AssertionError, TypeError: see `finish_init`.

    Source: the walk over ``named_modules()`` in Megatron's model builders; the report is not in Megatron.

    >>> from jax_te.layers import TransformerLayer
    >>> payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    >>> rule = {"enabled": True, "type": "glob", "pattern": "*proj", "config": "bf16"}
    >>> config = RecipeConfig.from_config_dict({"configs": {"bf16": payload}, "matchers": {"proj in bf16": rule}})
    >>> print(apply_quantization_config(TransformerLayer(32, 64, 4, rngs=nnx.Rngs(0)), config))
    module               class            matcher       config  training        evaluation      active when
    -------------------  ---------------  ------------  ------  --------------  --------------  -----------
    layernorm_mlp        LayerNormMLP     -             -       ambient         ambient         -
    self_attention.proj  Linear           proj in bf16  bf16    high precision  high precision  quantized
    self_attention.qkv   LayerNormLinear  -             -       ambient         ambient         -
    layers left to the ambient recipe: layernorm_mlp, self_attention.qkv
    """
    recipe_config = RecipeConfig([], {}) if recipe_config is None else recipe_config
    # Without the wrapper, so that the same file fits a model with and without Float16Module.
    layers = dict(quantizable_modules(model.module if isinstance(model, Float16Module) else model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no quantizable layer; jax_te.layers has: Linear, LayerNormLinear, "
            "LayerNormMLP and what is built from them"
        )
    # All payloads are parsed before any layer is changed, so that an error leaves the model as it was.
    units = [unit for path, layer in layers.items() for unit in _units(path, layer, recipe_config)]
    for layer in layers.values():
        layer.module_recipe, layer.kernel_recipes = None, ()
    for unit in units:
        if unit.kernel in (None, next(iter(unit.layer.kernels))):
            unit.layer.module_recipe = unit.recipe
        else:
            unit.layer.kernel_recipes = (*unit.layer.kernel_recipes, (unit.kernel, unit.recipe))
    return _report(units, recipe_config)


class _Unit(NamedTuple):
    """A layer, or one of its kernels if these are under different rules, and the rules' decision."""

    path: str
    layer: QuantizableModule
    kernel: str | None
    names: tuple[str, ...]
    rule: int | None
    config_key: str | None
    recipe: ModuleRecipe | None


def _units(path: str, layer: QuantizableModule, rules: RecipeConfig) -> list[_Unit]:
    """Return the units of one layer: itself, or its kernels if the rules that apply to them differ."""
    units = []
    for kernel, names in kernel_paths(path, layer).items():
        # The first rule that matches any of the names; of several names the first, which is the layer's path.
        hits = [(hit[0], i) for i, name in enumerate(names) if (hit := rules.first_match(match_context(name)))]
        rule, name = min(hits) if hits else (None, 0)
        config = get_quant_config_or_none(names[name], rules)
        key = None if config is None else config.config_key
        unit_path = names[1] if len(layer.kernels) > 1 else path
        units.append(_Unit(unit_path, layer, kernel, names, rule, key, own_recipe(config)))
    if len({unit.rule for unit in units}) > 1:
        return units
    every = tuple(dict.fromkeys(name for unit in units for name in unit.names))
    return [units[0]._replace(path=path, kernel=None, names=every)]


def _report(units: list[_Unit], rules: RecipeConfig) -> QuantizationReport:
    labels = [repr(matcher) if matcher.name is None else matcher.name for matcher in rules.matchers]
    modules = []
    for path, layer, _, _, rule, key, recipe in units:
        label = None if rule is None else labels[rule]
        modules.append(ModuleQuantization(path, type(layer).__name__, label, key, recipe))
    used, names = {unit.rule for unit in units}, [name for unit in units for name in unit.names]
    fitting = {
        # A rule that matches some path is not misspelt; if it applied nowhere, an earlier rule shadows it.
        index
        for index, matcher in enumerate(rules.matchers)
        if any(matcher.match(match_context(name)) is not None for name in names)
    }
    unused = tuple(label for i, label in enumerate(labels) if i not in fitting)
    if unused:
        shown = ", ".join(units[0].names + units[-1].names)
        _logger.warning("No layer's path matches the rules %s; paths are for example %s", ", ".join(unused), shown)
    given = {module.config_key for module in modules}
    return QuantizationReport(
        tuple(modules),
        unused_matchers=unused,
        shadowed_matchers=tuple(label for i, label in enumerate(labels) if i in fitting - used),
        disabled_matchers=rules.disabled,
        unused_configs=tuple(str(key) for key in rules.configs if key not in given),
    )


def _row(module: ModuleQuantization) -> tuple[str, ...]:
    own = module.module_recipe
    who = (module.path, module.kind, module.matcher or "-", module.config_key or "-")
    if own is None:
        return (*who, "ambient", "ambient", "-")
    # A string stands for "as in training"; None would be high precision.
    evaluation = own.training if isinstance(own.evaluation, str) else own.evaluation
    return (*who, _name(own.training), _name(evaluation), " / ".join(dict.fromkeys(_acts(own))))


def _name(recipe: Recipe | None) -> str:
    return "high precision" if recipe is None else recipe.name


def _acts(own: ModuleRecipe) -> tuple[str, str]:
    """Return where the recipe takes effect in training and in evaluation."""
    training, evaluation = (
        _ACTS[own.overrides(quantized=True, training=mode), own.overrides(quantized=False, training=mode)]
        for mode in (True, False)
    )
    return training, evaluation
