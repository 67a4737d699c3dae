"""Residuals of ops: their checkpoint names, and a barrier for loops over layers that stack them."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

residuals_are_stacked = jax.make_user_context(False)
"""Whether a loop over layers is being traced, which stacks the residuals of its iterations."""


def behind_barrier(out: Any, residuals: Any, args: Any) -> tuple[Any, Any]:
    """Return both behind a barrier, except residuals that are arguments; used if `residuals_are_stacked`.

    XLA for GPUs has a custom call write its result into the stacked array, and calls it once more where the result is
    also used otherwise (jax 0.11.2, compiled for an H200: attention and half of forward's GEMMs). A barrier stops it.
    """
    # An argument stays the same array: a loop does not stack again what it has sliced from a stack.
    leaves, treedef = jax.tree.flatten(residuals)
    own = _not_in(leaves, args)
    out, own = jax.lax.optimization_barrier((out, own))
    return out, jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])


def named(residuals: Any, name: str, *, given: Any) -> Any:
    """Return residuals under a checkpoint name, except those in ``given``, which no remat policy has to save.

    A named array is a new array: `behind_barrier` would no longer recognize a kernel that is an argument.
    """
    leaves, treedef = jax.tree.flatten(residuals)
    own = checkpoint_name(_not_in(leaves, given), name)
    return jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])


def _not_in(leaves: list[Any], given: Any) -> dict[int, Any]:
    known = set(map(id, jax.tree.leaves(given)))
    return {i: leaf for i, leaf in enumerate(leaves) if id(leaf) not in known}
