"""Precision recipes and their scope: data only, no arrays."""

from typing import TYPE_CHECKING, Any

from jax_te.recipe.base import GEMMS, MMParams, Recipe, Support
from jax_te.recipe.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.recipe.custom import CustomRecipe
from jax_te.recipe.format import E2M1_MAX, E4M3_MAX, Format, fp8_max
from jax_te.recipe.module_recipe import ModuleRecipe, first_rule, own_recipe
from jax_te.recipe.names import RECIPES, recipe_from_name
from jax_te.recipe.tensor_scaling import MAX_MARGIN, AmaxScope, DelayedScaling, Float8CurrentScaling

if TYPE_CHECKING:
    from jax_te.recipe.context import ambient_recipe, autocast, current_recipe, inside_autocast

# For users. The other names above are for the other packages of jax_te.
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

if not TYPE_CHECKING:  # type checkers accept any name of a module with a __getattr__

    def __getattr__(name: str) -> Any:
        # The ambient recipe is a context of JAX's, which the fields of recipes do without. It must exist before
        # anything is traced, since it is part of the jit cache key; whoever traces with it has imported one of these
        # names by then.
        if name not in ("ambient_recipe", "autocast", "current_recipe", "inside_autocast"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from jax_te.recipe import context

        return getattr(context, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
