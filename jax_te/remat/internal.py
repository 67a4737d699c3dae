"""Names of `jax_te.remat` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.remat.policy import WITNESS
from jax_te.remat.selective import ambient_modules, recomputed, run_recomputed

__all__ = [
    "WITNESS",
    "ambient_modules",
    "recomputed",
    "run_recomputed",
]
