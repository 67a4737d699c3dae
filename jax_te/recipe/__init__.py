"""Precision recipes and where they apply: data only, no arrays."""

from typing import TYPE_CHECKING

from jax_te._names import late_names
from jax_te.recipe.base import MMParams, Recipe, Support
from jax_te.recipe.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.recipe.custom import CustomRecipe
from jax_te.recipe.format import Format
from jax_te.recipe.module_recipe import ModuleRecipe
from jax_te.recipe.names import RECIPES, recipe_from_name
from jax_te.recipe.tensor_scaling import DelayedScaling, Float8CurrentScaling

if TYPE_CHECKING:
    from jax_te.recipe.context import autocast, current_recipe

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
    "recipe_from_name",
]

if not TYPE_CHECKING:
    # The ambient recipe is a context of JAX's, which the fields of recipes do without. It must exist before anything is
    # traced, since it is part of the jit cache key; whoever traces with it has imported one of these names by then.
    __getattr__ = late_names(__name__, dict.fromkeys(("autocast", "current_recipe"), "jax_te.recipe.context"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
