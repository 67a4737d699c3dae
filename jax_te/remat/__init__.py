"""Rematerialization: the arrays that forward saves for backward, and the arrays that backward recomputes."""

from jax_te.remat.at_once import loop_body
from jax_te.remat.carried import Changes, StaticChanges, Watched, on_failure_of_call, run_on_copies
from jax_te.remat.policy import (
    CHECKPOINT_NAMES,
    POLICIES,
    WITNESS,
    RecomputePolicy,
    recompute_policy,
    remat,
    run_with_gradients_at_once,
)
from jax_te.remat.selective import ambient_modules, recomputed, run_recomputed, selective_recompute

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "CHECKPOINT_NAMES",
    "POLICIES",
    "RecomputePolicy",
    "recompute_policy",
    "remat",
    "selective_recompute",
]
