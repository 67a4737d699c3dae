"""Attention on a mesh whose devices hold shards of the batch, the heads and the sequence.

`on_mesh` runs it, by one of the schemes in `ring`, `all_gather` and `ulysses`; `zigzag` is the load-balanced order.
"""

from jax_te.ops.attention.context_parallel.sharding import ContextParallel
from jax_te.ops.attention.context_parallel.zigzag import reorder_to_zigzag, undo_zigzag, zigzag_positions

__all__ = ["ContextParallel", "reorder_to_zigzag", "undo_zigzag", "zigzag_positions"]
