"""Names of `jax_te.remat` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.remat.selective import recomputed, run_recomputed

__all__ = [
    "recomputed",
    "run_recomputed",
]
