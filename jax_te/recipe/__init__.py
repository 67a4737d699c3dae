"""Precision recipes and where they apply: data only, no arrays."""

from jax_te.recipe.base import MMParams, Recipe, Support
from jax_te.recipe.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.recipe.context import autocast, current_recipe
from jax_te.recipe.custom import CustomRecipe
from jax_te.recipe.format import Format, fp8_max
from jax_te.recipe.module_recipe import ModuleRecipe
from jax_te.recipe.names import RECIPES, recipe_from_name
from jax_te.recipe.tensor_scaling import DelayedScaling, Float8CurrentScaling

__all__ = [
    "RECIPES",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "ModuleRecipe",
    "NVFP4BlockScaling",
    "Recipe",
    "Support",
    "autocast",
    "current_recipe",
    "fp8_max",
    "recipe_from_name",
]
