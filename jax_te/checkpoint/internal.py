"""Names of `jax_te.checkpoint` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.checkpoint.read import describe_checkpoint, say

__all__ = ["describe_checkpoint", "say"]
