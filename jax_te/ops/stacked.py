"""Residuals of ops inside of a loop over layers, which stores those of each turn in stacked arrays."""

from __future__ import annotations

from typing import Any

import jax

residuals_are_stacked = jax.make_user_context(False)
"""Whether a loop over layers is traced, which stores the residuals of each turn in stacked arrays."""


def behind_barrier(out: Any, residuals: Any, args: Any) -> tuple[Any, Any]:
    """Return both behind a barrier, but for residuals that are arguments; for where `residuals_are_stacked`.

    XLA for GPUs has a custom call write its result into the stacked array, and calls it once more where the result is
    also used otherwise (jax 0.11.2, compiled for an H200: attention and half of forward's GEMMs). A barrier stops it.
    """
    # An argument stays the array that it is: a loop stacks no array that is the same in all turns.
    given, (leaves, treedef) = set(map(id, jax.tree.leaves(args))), jax.tree.flatten(residuals)
    own = {i: leaf for i, leaf in enumerate(leaves) if id(leaf) not in given}
    out, own = jax.lax.optimization_barrier((out, own))
    return out, jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])
