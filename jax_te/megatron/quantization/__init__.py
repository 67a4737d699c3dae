"""Precision by name, as in Megatron-Core: quantization files, their recipes and rules, and what they do to a model."""

from jax_te.megatron.quantization.yaml_file import parse_yaml
