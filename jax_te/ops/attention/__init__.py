"""Dot-product attention, on one device and on a mesh."""

from jax_te.ops.attention.masks import normal_window
from jax_te.ops.attention.segments import check_boundaries, segment_positions
from jax_te.ops.attention.spec import QKV, AttentionArrays
