"""States of delayed scaling in derivatives of tests, whose gradients are to be fp32 as the states are."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax_te.quantize import QuantizerState, is_amax_state, with_max_gradients_inside
from jax_te.quantize.counting import counting_of


def merging(tree: Any) -> Any:
    """Return a tree, inside a function that is differentiated, whose states have gradients that merge by maximum.

    A module is returned as a new one.
    """
    if isinstance(tree, nnx.Module):
        graphdef, state = nnx.split(tree)
        return nnx.merge(graphdef, merging(state))

    def is_state(node: Any) -> bool:
        return is_amax_state(node) or (isinstance(node, QuantizerState) and counting_of(node) is None)

    def converted(node: Any) -> Any:
        return with_max_gradients_inside(node) if is_state(node) else node

    return jax.tree.map(converted, tree, is_leaf=lambda node: is_state(node) or isinstance(node, nnx.Variable))
