"""Names of `jax_te.cli` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.cli.main import main

__all__ = ["main"]
