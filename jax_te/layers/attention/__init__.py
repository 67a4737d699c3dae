"""Layers of attention: projections, the core, masks, positions and caches."""

from jax_te.layers.attention.padding_mask import (
    MaskArguments,
    arbitrary_mask,
    check_padding_at_end,
    log_unread_mask,
    padding_pair,
    read_mask,
)
from jax_te.layers.attention.qkv import merge_heads
