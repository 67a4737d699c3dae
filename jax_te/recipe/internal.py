"""Names of `jax_te.recipe` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.recipe.base import GEMMS
from jax_te.recipe.context import ambient_recipe
from jax_te.recipe.format import E2M1_MAX, E4M3_MAX, fp8_max

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "GEMMS",
    "ambient_recipe",
    "fp8_max",
]
