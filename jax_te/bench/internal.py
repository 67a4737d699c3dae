"""Names of `jax_te.bench` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.bench.command import add_parser

__all__ = [
    "add_parser",
]
