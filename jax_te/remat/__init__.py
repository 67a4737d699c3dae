"""Rematerialization: which arrays backward reads as forward saved them, and which it computes again."""

from typing import TYPE_CHECKING

from jax_te._names import late_names
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

if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)  # names that moved
