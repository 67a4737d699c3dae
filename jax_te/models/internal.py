"""Names of `jax_te.models` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.models.stack import check_recompute_policy

__all__ = [
    "check_recompute_policy",
]
