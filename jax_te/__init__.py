"""Megatron-Core's Transformer Engine layers and precision system for JAX and Flax."""

__version__ = "0.1.0"
