"""Precision by name, as in Megatron-Core: quantization files, their recipes and rules, and their application."""

from jax_te.megatron.quantization.yaml_file import parse_yaml
