"""Layers of attention: projections, the core, masks, positions and caches."""
