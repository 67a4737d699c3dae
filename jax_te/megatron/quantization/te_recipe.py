"""A layer's own recipe in the form of Megatron's quantization files, and its translation to `jax_te.recipe`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax_te._validation import brief, checked, log_once
from jax_te.megatron.enums import Fp4Recipe, Fp8Recipe
from jax_te.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

FP8_RECIPES: dict[str, type[Recipe]] = {
    "tensorwise": Float8CurrentScaling,
    "blockwise": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
}
"""Recipes by Megatron's names, without those of a whole model or a factory: ``"delayed"`` and ``"custom"``."""

FP8_FORMATS = {"e4m3": Format.E4M3, "hybrid": Format.HYBRID}
"""Formats by Megatron's names."""

_BOOLS = (
    "override_quantized_autocast",
    "override_nonquantized_autocast",
    "tp_only_amax_red",
    "fp8_param",
    "fp4_param",
)


@checked
@dataclass(frozen=True)
class TEQuantizationRecipe:
    """The precision of a layer in one mode (training or evaluation), and when it takes effect.

    Args:
        fp8_quantization_recipe: an `Fp8Recipe` or its string. With this and the next one None: high precision.
        fp4_quantization_recipe: an `Fp4Recipe` or its string.
        custom_recipe_factory: ``"package.module.function"``, the ``qfactory`` of `jax_te.recipe.CustomRecipe`; required
            if a recipe is ``"custom"``. `to_recipe` imports it.
        fp8_format: ``"e4m3"`` or ``"hybrid"`` (E4M3 forward, E5M2 for gradients).
        override_quantized_autocast: whether to take effect if the ambient context is quantized.
        override_nonquantized_autocast: whether to take effect if the ambient context is not quantized.
        tp_only_amax_red: see below.
        fp8_param, fp4_param: whether to store the layer's kernels quantized.

    Differences from Megatron: instances are frozen and hashable, since they select code under ``jit``. A flag that is
    not bool is refused at once (Megatron takes the text ``"no"`` as true). `to_recipe` checks names, so that errors
    appear when a recipe is attached to a layer, not in its first forward pass. `to_recipe` also refuses fields that
    have no effect, which Megatron ignores: ``custom_recipe_factory`` without a custom recipe, ``fp8_param`` and
    ``fp4_param`` without a recipe of their kind. ``fp8_format`` other than ``"e4m3"`` without an FP8 recipe of a fixed
    name, and ``tp_only_amax_red``, which concerns only delayed scaling, never a layer's own recipe, are logged once:
    files name them for every recipe.

    Raises:
        TypeError: for a flag that is not a bool.

    Source: ``megatron.core.extensions.transformer_engine.TEQuantizationRecipe``.

    >>> TEQuantizationRecipe(fp8_quantization_recipe="tensorwise").to_recipe().name
    'current'
    """

    fp8_quantization_recipe: Fp8Recipe | str | None = None
    fp4_quantization_recipe: Fp4Recipe | str | None = None
    custom_recipe_factory: str | None = None
    fp8_format: str = "e4m3"
    override_quantized_autocast: bool = True
    override_nonquantized_autocast: bool = False
    tp_only_amax_red: bool = False
    fp8_param: bool = False
    fp4_param: bool = False

    def __post_init__(self) -> None:
        for name in _BOOLS:
            # YAML reads quoted "no" as text, which is true.
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {brief(getattr(self, name))}")

    @classmethod
    def get_config_keys(cls) -> set[str]:
        """Return the keys that `parse_from_config` accepts.

        >>> len(TEQuantizationRecipe.get_config_keys())
        9
        """
        return {field.name for field in fields(cls)}

    @classmethod
    def parse_from_config(
        cls, quant_config: Mapping[Any, Any], factory_modules: Collection[str] = ()
    ) -> TEQuantizationRecipe:
        """Return the recipe of a mapping in a quantization file; ``{}`` is high precision.

        Args:
            quant_config: the mapping.
            factory_modules: modules whose functions it may name as ``custom_recipe_factory``. Importing a module runs
                its code, so a file alone cannot make this package import one; in Megatron it can.

        Raises:
            ValueError: in this order: for an unknown key; for delayed scaling, whose state belongs to the whole model;
                for both an FP8 and an FP4 recipe; for ``"custom"`` without ``custom_recipe_factory``; for a factory
                of a module that is not in ``factory_modules``.
            TypeError: if the argument is not a mapping (a blank YAML value is None), or a flag is not a bool.

        >>> TEQuantizationRecipe.parse_from_config({"fp8_quantization_recipe": "mxfp8"}).fp8_format
        'e4m3'
        """
        if not isinstance(quant_config, Mapping):
            raise TypeError(f"a recipe must be a mapping, {{}} for high precision; got {brief(quant_config)}")
        allowed = cls.get_config_keys()
        unknown = [key for key in quant_config if key not in allowed]
        if unknown:
            raise ValueError(
                f"unknown key {brief(unknown)[1:-1]} in a quantization recipe; allowed: {', '.join(sorted(allowed))}"
            )
        fp8, fp4 = (quant_config.get(f"{kind}_quantization_recipe") for kind in ("fp8", "fp4"))
        # Each check below assumes the ones before; the order is Megatron's.
        if fp8 == Fp8Recipe.delayed:
            raise ValueError(
                "fp8_quantization_recipe 'delayed' cannot be a layer's own: its amax histories belong to the whole "
                "model. Use 'tensorwise', 'blockwise' or 'mxfp8', or autocast(DelayedScaling()) around the model"
            )
        if fp8 is not None and fp4 is not None:
            raise ValueError(
                f"fp8_quantization_recipe {brief(fp8)} and fp4_quantization_recipe {brief(fp4)} are both given; give "
                "one of them"
            )
        factory = quant_config.get("custom_recipe_factory")
        if "custom" in (fp8, fp4) and factory is None:
            raise ValueError(
                "the recipe 'custom' needs custom_recipe_factory, the dotted path of its factory, "
                "e.g. 'my_package.recipes.make_quantizer'"
            )
        module = factory.rpartition(".")[0] if isinstance(factory, str) else ""
        if factory is not None and module not in factory_modules:
            raise ValueError(
                f"custom_recipe_factory {brief(factory)} would import a module, and a file alone may not make code "
                "run; if you trust the module, name it in factory_modules, for jax-te in --factory-modules"
            )
        return cls(**quant_config)

    def to_recipe(self) -> Recipe | None:
        """Return the equivalent recipe of `jax_te.recipe`; None is high precision.

        Raises:
            ValueError: for unknown names ("Unhandled ..."), including ``"delayed"``, which only the constructor
                accepts; for a factory that cannot be found; for fields that have no effect.

        >>> TEQuantizationRecipe(fp4_quantization_recipe="nvfp4").to_recipe().name
        'nvfp4'
        """
        fp8, fp4 = self.fp8_quantization_recipe, self.fp4_quantization_recipe
        # First, so that an idle field is reported also if a name is wrong.
        self._refuse_fields_without_effect()
        # Before the names: "custom" may stand for FP8 and for FP4, the factory decides.
        if "custom" in (fp8, fp4):
            return CustomRecipe(qfactory=resolve_factory(self.custom_recipe_factory))
        if fp8 is not None:
            return _recipe_class(fp8)(fp8_format=_format(self.fp8_format))
        if fp4 is not None:
            if fp4 != Fp4Recipe.nvfp4:
                raise ValueError(f"Unhandled FP4 recipe {brief(fp4)}; allowed: nvfp4, custom")
            return NVFP4BlockScaling()
        return None

    def _refuse_fields_without_effect(self) -> None:
        fp8, fp4 = self.fp8_quantization_recipe, self.fp4_quantization_recipe
        custom = "custom" in (fp8, fp4)
        # Files name these two for every recipe; Megatron reads one only for delayed scaling, the other for FP8.
        if self.tp_only_amax_red:
            log_once(
                "tp_only_amax_red is for delayed scaling, which no layer has of its own, and has no effect",
                logging.INFO,
            )
        if self.fp8_format != "e4m3" and (custom or fp8 is None):
            log_once(f"fp8_format {brief(self.fp8_format)} has no effect where no FP8 recipe reads it", logging.INFO)
        idle = {
            "custom_recipe_factory": (self.custom_recipe_factory is not None and not custom, "no recipe is 'custom'"),
            "fp8_param": (self.fp8_param and fp8 is None, "there is no FP8 recipe"),
            "fp4_param": (self.fp4_param and fp4 is None, "there is no FP4 recipe"),
        }
        for name, (given, why) in idle.items():
            if given:
                raise ValueError(f"{name}={brief(getattr(self, name))} has no effect, because {why}; leave it out")


@checked
def resolve_factory(path: str | None) -> Callable[[str], Any]:
    """Return the function at a dotted path.

    Raises:
        ValueError: if the path is empty or not a string, has no dot, names a module that cannot be imported, or an
            attribute that does not exist or cannot be called.

    Source: the resolution of ``custom_recipe_factory`` in ``megatron.core.fp8_utils``.

    >>> resolve_factory("math.sqrt")(4.0)
    2.0
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"custom_recipe_factory must be a path like 'package.module.function', got {brief(path)}")
    # The last dot: modules may be nested, functions inside of classes are not supported.
    module_name, dot, name = path.rpartition(".")
    if not dot or not module_name or not name:
        raise ValueError(f"custom_recipe_factory {path!r} must name a module and a function: 'package.module.function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"custom_recipe_factory {brief(path)}: cannot import {module_name!r}: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"custom_recipe_factory {brief(path)}: module {module_name!r} has no attribute {name!r}")
    factory = getattr(module, name)
    if not callable(factory):
        raise ValueError(f"custom_recipe_factory {brief(path)} is not callable: {factory!r}")
    return factory


def _recipe_class(name: Any) -> type[Recipe]:
    for known, recipe in FP8_RECIPES.items():  # not a lookup: a YAML value may be unhashable
        if name == known:
            return recipe
    hint = "; delayed scaling cannot be a layer's own recipe" if name == Fp8Recipe.delayed else ""
    raise ValueError(f"Unhandled FP8 recipe {brief(name)}; allowed: {', '.join(FP8_RECIPES)}, custom{hint}")


def _format(name: Any) -> Format:
    for known, value in FP8_FORMATS.items():
        if name == known:
            return value
    raise ValueError(f"Unhandled fp8_format {brief(name)}; allowed: {', '.join(FP8_FORMATS)}")
