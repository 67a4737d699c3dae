"""Dot-product attention, on one device and on a mesh."""
