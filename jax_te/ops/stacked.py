"""Residuals of ops: their checkpoint names, and a barrier for loops over layers that stack them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

residuals_are_stacked = jax.make_user_context(False)
"""Whether a loop over layers is traced, see `loop_over_layers`."""


@contextlib.contextmanager
def loop_over_layers() -> Iterator[None]:
    """Return a context for a loop over layers that is differentiated: ``jax.lax.scan`` or ``nnx.scan`` of your own.

    Such a loop stores the residuals of each turn in stacked arrays. In this context ops put them behind a barrier,
    without which XLA for GPUs may run a kernel twice in each turn: once for the stacked array, once for what reads its
    result. Values are the same. `jax_te.models.run_layers` enters it by itself. A loop cannot be told from other
    programs where its body is traced, so it has to be said.

    >>> from jax_te.ops import dense
    >>> with loop_over_layers():
    ...     y, _ = jax.lax.scan(lambda x, kernel: (dense(x, kernel), None), jnp.ones((4, 16)), jnp.ones((3, 16, 16)))
    >>> y.shape
    (4, 16)
    """
    with residuals_are_stacked(True):
        yield


def behind_barrier(out: Any, residuals: Any, args: Any) -> tuple[Any, Any]:
    """Return both behind a barrier, except residuals that are arguments; used in a `loop_over_layers`.

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
