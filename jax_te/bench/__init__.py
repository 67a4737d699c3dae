"""Measurements of layers, attention, train steps and models beside their peers."""

__all__: list[str] = []
