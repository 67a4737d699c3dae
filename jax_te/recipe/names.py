"""Recipes by name, as on a command line."""

from __future__ import annotations

from jax_te._validation import checked
from jax_te.recipe.base import Recipe
from jax_te.recipe.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.recipe.tensor_scaling import DelayedScaling, Float8CurrentScaling

# CustomRecipe is not among them: its factory is a function.
RECIPES: dict[str, type[Recipe] | None] = {
    "none": None,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
"""Names of the recipes that need no argument; ``"none"`` is not quantization."""


@checked
def recipe_from_name(name: str) -> Recipe | None:
    """Return the recipe with default fields for a command-line name; ``"none"`` gives None.

    Raises:
        ValueError: for another name.

    >>> recipe_from_name("current").fp8_format
    <Format.HYBRID: 'hybrid'>
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; allowed: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    return None if recipe is None else recipe()
