"""Layers of mixtures of experts."""
