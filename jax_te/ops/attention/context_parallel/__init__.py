"""Attention on a mesh: every device has a part of the batch, the heads and the sequence."""

from jax_te.ops.attention.context_parallel.call import ContextParallel
from jax_te.ops.attention.context_parallel.order import reorder_to_zigzag, undo_zigzag, zigzag_positions

__all__ = ["ContextParallel", "reorder_to_zigzag", "undo_zigzag", "zigzag_positions"]
