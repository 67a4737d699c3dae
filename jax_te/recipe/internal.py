"""Names of `jax_te.recipe` for the other packages of jax_te. Not for users: they may change without notice."""

from typing import TYPE_CHECKING, Any

from jax_te.recipe.base import GEMMS
from jax_te.recipe.format import E2M1_MAX, E4M3_MAX, fp8_max
from jax_te.recipe.module_recipe import first_rule, own_recipe
from jax_te.recipe.tensor_scaling import MAX_MARGIN, AmaxScope

if TYPE_CHECKING:
    from jax_te.recipe.context import ambient_recipe

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "GEMMS",
    "MAX_MARGIN",
    "AmaxScope",
    "ambient_recipe",
    "first_rule",
    "fp8_max",
    "own_recipe",
]


def __getattr__(name: str) -> Any:
    # As in the package itself: the other names import without jax, and the command line's --help needs one of them.
    if name != "ambient_recipe":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_te.recipe.context import ambient_recipe

    return ambient_recipe
