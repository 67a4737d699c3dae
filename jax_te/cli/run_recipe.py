"""The recipe of a run as options: which fields each recipe has, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_te.recipe import RECIPES, Format, MMParams, Recipe, recipe_from_name

GEMMS = ("fprop", "dgrad", "wgrad")
"""The three GEMMs of a linear layer, in the order of ``Recipe.override_linear_precision``."""

_INVERTED = {
    "rht": "disable_rht",
    "stochastic_rounding": "disable_stochastic_rounding",
    "square_blocks": "disable_2d_quantization",
}
_SCALED_ONCE = ("delayed", "current")
_QUANTIZED = tuple(name for name in RECIPES if name != "none")

RECIPE_FIELDS: dict[str, tuple[str, ...]] = {
    "fp8_format": (*_SCALED_ONCE, "block", "mxfp8"),
    "amax_history_len": ("delayed",),
    "amax_compute_algo": ("delayed",),
    "margin": ("delayed",),
    "use_power_2_scales": ("current",),
    "use_f32_scales": ("block",),
    "rht": ("nvfp4",),
    "stochastic_rounding": ("nvfp4",),
    "square_blocks": ("nvfp4",),
    "fp8_accumulation": _SCALED_ONCE,
    "override_linear_precision": _QUANTIZED,
}
"""Field of a `RunConfig` -> the recipes that have it."""


def recipe_defaults(name: str) -> dict[str, Any]:
    """The fields that a recipe has, with its own defaults.

    >>> recipe_defaults("block")
    {'fp8_format': 'e4m3', 'use_f32_scales': False, 'override_linear_precision': None}
    """
    recipe = recipe_from_name(name)
    return {} if recipe is None else {f: _read(recipe, f) for f, names in RECIPE_FIELDS.items() if name in names}


def build_recipe(name: str, given: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a name with fields as a command line gives them; None for ``"none"``.

    Args:
        name: a key of `RECIPES`.
        given: field of `RECIPE_FIELDS` -> value; None leaves the recipe's default.

    Raises:
        ValueError: for an unknown recipe, a field that it has not, or a value that it does not take. The message names
            the option.

    >>> build_recipe("delayed", {"margin": 1, "fp8_accumulation": "precise"}).margin
    1
    """
    if name not in RECIPES:
        raise ValueError(f"unknown --recipe {name!r}; allowed: {', '.join(RECIPES)}")
    given = {field: value for field, value in given.items() if value is not None}
    for field in given:
        if name not in RECIPE_FIELDS[field]:
            *others, last = RECIPE_FIELDS[field]
            owners = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{option(field)} is for --recipe {owners}, and the recipe is {name}")
    recipe = RECIPES[name]
    return None if recipe is None else recipe(**_arguments(given))


def _read(recipe: Any, field: str) -> Any:
    if field == "fp8_format":
        return recipe.fp8_format.value
    if field == "override_linear_precision":
        return None
    if field == "fp8_accumulation":
        return "precise" if recipe.fp8_gemm_fprop.use_split_accumulator else "fast"
    return not getattr(recipe, _INVERTED[field]) if field in _INVERTED else getattr(recipe, field)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a recipe for a run's fields."""
    arguments = {}
    for field, value in given.items():
        if field == "fp8_format":
            arguments[field] = _format(value)
        elif field == "override_linear_precision":
            arguments[field] = tuple(gemm in gemm_list(value) for gemm in GEMMS)
        elif field == "fp8_accumulation":
            if value not in ("fast", "precise"):
                raise ValueError(f"--fp8-accumulation must be fast or precise, got {value!r}")
            params = MMParams(use_split_accumulator=value == "precise")
            arguments |= {f"fp8_gemm_{gemm}": params for gemm in GEMMS}
        elif field in _INVERTED:
            arguments[_INVERTED[field]] = not value
        else:
            arguments[field] = value
    return arguments


def _format(value: str) -> Format:
    try:
        return Format(value)
    except ValueError:
        raise ValueError(f"--fp8-format must be hybrid or e4m3, got {value!r}") from None


def gemm_list(text: str) -> tuple[str, ...]:
    """The GEMMs that a comma-separated text names, in the order of `GEMMS`.

    Raises:
        ValueError: for a name that is none, or given twice, and for no name at all.

    >>> gemm_list("wgrad,fprop")
    ('fprop', 'wgrad')
    """
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if name not in GEMMS or names.count(name) > 1]
    if wrong:
        raise ValueError(
            f"--override-linear-precision takes some of {', '.join(GEMMS)}, separated by commas and each once; "
            f"got {text!r}"
        )
    return tuple(gemm for gemm in GEMMS if gemm in names)


def option(name: str) -> str:
    """The command-line option of a field.

    >>> option("hidden_size")
    '--hidden-size'
    """
    return "--" + name.replace("_", "-")
