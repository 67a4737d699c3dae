"""Layers of attention: projections, the core, masks, positions and caches."""

from jax_te.layers.attention.padding_mask import arbitrary_mask, padding_pair
from jax_te.layers.attention.qkv import merge_heads
