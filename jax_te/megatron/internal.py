"""Names of `jax_te.megatron` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.megatron.yaml_file import parse_yaml

__all__ = [
    "parse_yaml",
]
