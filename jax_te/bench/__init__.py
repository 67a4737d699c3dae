"""Measurements of layers, attention, steps and models beside their peers."""

__all__: list[str] = []
