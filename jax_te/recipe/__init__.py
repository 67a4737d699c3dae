"""Precision recipes and where they apply: data only, no arrays."""

from jax_te.recipe.context import autocast, current_recipe
from jax_te.recipe.format import Format, fp8_max
from jax_te.recipe.recipes import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    Recipe,
    recipe_from_name,
)

__all__ = [
    "RECIPES",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Format",
    "Recipe",
    "autocast",
    "current_recipe",
    "fp8_max",
    "recipe_from_name",
]
