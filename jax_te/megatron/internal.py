"""Names of `jax_te.megatron` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.megatron.layout import Layout
from jax_te.megatron.quantization.yaml_file import parse_yaml
from jax_te.megatron.state_dict import load_variables
from jax_te.megatron.transformer_layer import layer_options, layer_precision

__all__ = [
    "Layout",
    "layer_options",
    "layer_precision",
    "load_variables",
    "parse_yaml",
]
