"""Quantization of models that are built of Flax's own layers."""
