"""Checkpoint names of residuals, by which remat policies save them."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name


def named(residuals: Any, name: str, *, given: Any) -> Any:
    """Return residuals under a checkpoint name, except those in ``given``, which no remat policy has to save."""
    leaves, treedef = jax.tree.flatten(residuals)
    known = set(map(id, jax.tree.leaves(given)))
    own = checkpoint_name({i: leaf for i, leaf in enumerate(leaves) if id(leaf) not in known}, name)
    return jax.tree.unflatten(treedef, [own.get(i, leaf) for i, leaf in enumerate(leaves)])
