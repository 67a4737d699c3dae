"""Uses of a layer's states in one derivative, counted by a variable beside them, so that sums of next states show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad

from jax_te.quantize import USES, QuantizerState
from jax_te.typing import Array


def count_use(module: nnx.Module, uses: Array) -> None:
    """Count a use of the states of ``module``, which become nan if ``uses`` is not 1.

    The gradient of a state is its next value, and JAX adds those of several uses. The sum is finite, and nothing in it
    tells it from a state. The gradient of ``uses`` is 1 for each use: written back with the states, it tells the next
    call whether they are of one.

    Args:
        module: module with its variables.
        uses: fp32 ``[]``.
    """
    states = nnx.state(module, QuantizerState)
    values = nnx.to_pure_dict(states)
    # Gradients of the other dtype, which cannot be selected, merge by maximum.
    if not jax.tree.leaves(values) or any(leaf.dtype == fp32_max_grad for leaf in jax.tree.leaves(values)):
        return
    nnx.replace_by_pure_dict(states, _used_once(values, uses))
    nnx.update(module, states)


@jax.custom_vjp
def _used_once(states: Any, uses: Array) -> Any:
    def nan_unless_one(leaf: Array) -> Array:
        return jnp.where(uses == 1.0, leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(nan_unless_one, states)


def _fwd(states: Any, uses: Array) -> tuple[Any, Array]:
    return _used_once(states, uses), uses


def _bwd(uses: Array, next_states: Any) -> tuple[Any, Array]:
    return next_states, jnp.ones_like(uses)


_used_once.defvjp(_fwd, _bwd)


def without_uses(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the collection of one layer without `USES`."""
    return {name: value for name, value in states.items() if name != USES}
