"""The recipe of a run: conversion of its option fields to a `Recipe`, and of defaults back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_te.cli.option_table import either, flag
from jax_te.cli.options import OPTIONS
from jax_te.recipe import GEMMS, Format, MMParams, Recipe, recipe_from_name

RECIPE_FIELDS = {name: row.recipes for name, row in OPTIONS.items() if row.recipes}
"""Field of a `RunConfig` -> the recipes that have it."""

_INVERTED = {
    "rht": "disable_rht",
    "stochastic_rounding": "disable_stochastic_rounding",
    "square_blocks": "disable_2d_quantization",
}
"""Options that are on where the recipe's field is off."""


def recipe_defaults(name: str) -> dict[str, Any]:
    """Return the fields that a recipe has, with its own defaults.

    >>> recipe_defaults("block")
    {'fp8_format': 'e4m3', 'use_f32_scales': False, 'override_linear_precision': None}
    """
    recipe: Any = recipe_from_name(name)  # Any: each field is one of some recipes' only

    def default(field: str) -> Any:
        if field == "fp8_format":
            return recipe.fp8_format.value
        if field == "override_linear_precision":
            return None  # config.json has names of GEMMs, and null for none
        if field == "fp8_accumulation":
            return "precise" if recipe.fp8_gemm_fprop.use_split_accumulator else "fast"
        return not getattr(recipe, _INVERTED[field]) if field in _INVERTED else getattr(recipe, field)

    return {field: default(field) for field, recipes in RECIPE_FIELDS.items() if name in recipes}


def build_recipe(name: str, given: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of a name with the command line's fields; None for ``"none"``.

    Args:
        name: a key of `jax_te.recipe.RECIPES`.
        given: field of `RECIPE_FIELDS` -> value; None leaves the recipe's default.

    Raises:
        ValueError: for a field that the recipe does not have. The message names the option.

    >>> build_recipe("delayed", {"margin": 1, "fp8_accumulation": "precise"}).margin
    1
    """
    arguments: dict[str, Any] = {}
    for field, value in given.items():
        if value is None:
            continue
        if name not in RECIPE_FIELDS[field]:
            raise ValueError(f"{flag(field)} is for --recipe {either(RECIPE_FIELDS[field])}, and the recipe is {name}")
        if field == "fp8_format":
            arguments[field] = Format(value)
        elif field == "override_linear_precision":
            arguments[field] = tuple(gemm in value.split(",") for gemm in GEMMS)
        elif field == "fp8_accumulation":
            # One option for all three GEMMs; the library has a field for each.
            params = MMParams(use_split_accumulator=value == "precise")
            arguments |= {f"fp8_gemm_{gemm}": params for gemm in GEMMS}
        elif field in _INVERTED:
            arguments[_INVERTED[field]] = not value
        else:
            arguments[field] = value
    recipe = recipe_from_name(name)
    return None if recipe is None else type(recipe)(**arguments)
