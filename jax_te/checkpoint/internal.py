"""Names of `jax_te.checkpoint` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.checkpoint.read import describe_checkpoint, say
from jax_te.checkpoint.signs import Signs

__all__ = ["Signs", "describe_checkpoint", "say"]
