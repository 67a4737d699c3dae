"""Quantization of models that are built of Flax's own layers, and of modules of people's own."""
