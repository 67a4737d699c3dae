"""Rematerialization: which arrays backward reads as forward saved them, and which it computes again."""

from jax_te.remat.policy import CHECKPOINT_NAMES, POLICIES, RecomputePolicy, recompute_policy, remat
from jax_te.remat.selective import selective_recompute

__all__ = [
    "CHECKPOINT_NAMES",
    "POLICIES",
    "RecomputePolicy",
    "recompute_policy",
    "remat",
    "selective_recompute",
]
