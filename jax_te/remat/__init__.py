"""Recomputation: what backward keeps of a function, and what it computes again."""

from jax_te.remat.policy import CHECKPOINT_NAMES, POLICIES, RecomputePolicy, checkpoint, recompute_policy
from jax_te.remat.selective import selective_recompute
from jax_te.remat.split_backward import split_vjp

__all__ = [
    "CHECKPOINT_NAMES",
    "POLICIES",
    "RecomputePolicy",
    "checkpoint",
    "recompute_policy",
    "selective_recompute",
    "split_vjp",
]
