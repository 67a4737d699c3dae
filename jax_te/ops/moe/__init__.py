"""Mixtures of experts as differentiable functions on arrays: rows sorted by expert, and their GEMMs."""
