"""Residuals of ops: their checkpoint names, and what a loop over layers needs that stacks those of its turns."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

residuals_are_stacked = jax.make_user_context(False)
"""Whether a loop over layers is traced, which stores the residuals of each turn in stacked arrays."""


def behind_barrier(out: Any, residuals: Any, args: Any) -> tuple[Any, Any]:
    """Return both behind a barrier, but for residuals that are arguments; for where `residuals_are_stacked`.

    XLA for GPUs has a custom call write its result into the stacked array, and calls it once more where the result is
    also used otherwise (jax 0.11.2, compiled for an H200: attention and half of forward's GEMMs). A barrier stops it.
    """
    # An argument stays the array that it is: a loop does not stack again what it has sliced from a stack.
    leaves, treedef = jax.tree.flatten(residuals)
    own = _not_in(leaves, args)
    out, own = jax.lax.optimization_barrier((out, own))
    return out, jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])


def named(residuals: Any, name: str, *, given: Any) -> Any:
    """Return residuals under a checkpoint name, but for those in ``given``, which no remat policy has to save.

    A name makes another array of one: `behind_barrier` would no longer know a kernel that is an argument.
    """
    leaves, treedef = jax.tree.flatten(residuals)
    own = checkpoint_name(_not_in(leaves, given), name)
    return jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])


def _not_in(leaves: list[Any], given: Any) -> dict[int, Any]:
    known = set(map(id, jax.tree.leaves(given)))
    return {i: leaf for i, leaf in enumerate(leaves) if id(leaf) not in known}
