"""Gradients of states in Linen: a loop writes the gradient of the collection over it, so they must be next values.

What layers give as the gradient of a state is not yet its next value: amaxes of several uses merge, and counts add up,
in functions that a loop of Flax does not call. Each call of a `LinenModule` therefore makes next values of the
gradients of its own states.

JAX adds the next values of several calls in one derivative. Such a sum is finite, and nothing in it tells it from a
state. So the collection has a number beside the states of each module, `USES`, which is 1 and whose gradient is 1 for
each call. A call that reads another number has read a sum, or the zeros of a module that a step left out, and its
result is nan.

Inside of `jax_te.linen.value_and_grad`, which merges the gradients of all calls itself, they stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad

from jax_te.quantize import QuantizerState, as_float32, has_counts, with_max_gradients_inside, write_back
from jax_te.sharding import mark_varying, varying_axes
from jax_te.typing import Array


class EnteredStates(NamedTuple):
    """States as a call reads them.

    Args:
        states: states of the module, nan if ``uses`` is not 1.
        uses: number of uses, fp32 ``[]``.
        merged: whether the caller merges the gradients of several calls.
    """

    states: nnx.State
    uses: Array
    merged: bool


def enter_states(module: nnx.Module, uses: Array | None, *, merged: bool) -> EnteredStates:
    """Let a call of ``module`` read its states, whose gradients are next values, or nan if ``uses`` is not 1.

    Args:
        module: module with its variables, in which the states are replaced.
        uses: number of uses, fp32 ``[]``. None: not known, and not tested.
        merged: whether `jax_te.linen.value_and_grad` merges the gradients of several calls: then they are left as they
            are, as those of a loop of the caller's own that merges them by `with_max_gradients`.
    """
    states = nnx.state(module, QuantizerState)
    merged = merged or any(leaf.dtype == fp32_max_grad for leaf in jax.tree.leaves(states))
    uses = jnp.ones((), jnp.float32) if uses is None else uses

    @jax.custom_vjp
    def read(states: nnx.State, uses: Array) -> nnx.State:
        return jax.tree.map(lambda state: _nan_unless(_is_one(uses), state), states)

    def bwd(given: Any, gradient: Any) -> tuple[Any, Array]:
        states, uses = given
        # In a shard_map of the user's a gradient varies along the axes that its array varies along.
        one = mark_varying(jax.lax.convert_element_type(1.0, uses.dtype), varying_axes(uses))
        return gradient if merged else write_back(states, gradient), one

    read.defvjp(lambda states, uses: (read(states, uses), (states, uses)), bwd)
    if states:
        states = read(states, uses)
        # Within the call, too, gradients of several uses of a state are to merge.
        nnx.update(module, states if merged else with_max_gradients_inside(states))
    return EnteredStates(states, uses, merged)


def leave_states(result: Any, entered: EnteredStates) -> Any:
    """Return the result of a call that has read ``entered``."""
    states, uses, merged = entered
    if not merged:
        # The derivative reaches all states: one that the call did not use, as outside of the recipe or in evaluation,
        # has the gradient 0, of which `write_back` makes the state as it is.
        result = with_gradient(result, states, jax.tree.map(jnp.zeros_like, states))
    # A scale that is nan makes the result nan. Routing by a bias that is nan would go on with finite numbers.
    return _nan_unless_used_once(result, uses) if has_counts(states) else result


def _nan_unless_used_once(result: Any, uses: Array) -> Any:
    """Return the result of a call; its floats and their gradients are nan if ``uses`` is not 1."""
    factor = jnp.where(_is_one(jax.lax.stop_gradient(uses)), 1.0, jnp.nan)

    def product(leaf: Any) -> Any:
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf * factor.astype(leaf.dtype) if is_float else leaf

    return jax.tree.map(product, result)


def with_gradient(result: Any, states: Any, gradient: Any) -> Any:
    """Return ``result``, whose derivative gives ``states`` a gradient, beside what else gives them one.

    Args:
        result: pytree. It is returned as it is if a derivative can take no array of it.
        states: pytree of arrays.
        gradient: gradient of ``states``.
    """
    leaves, treedef = jax.tree.flatten(result)
    # One array carries the states; what else a call returns stays as it is.
    place = next((place for place, leaf in enumerate(leaves) if _is_differentiable(leaf)), None)
    if place is None or not jax.tree.leaves(states):
        return result
    leaves[place] = _carrying(leaves[place], states, gradient)
    return jax.tree.unflatten(treedef, leaves)


@jax.custom_vjp
def _carrying(leaf: Array, states: Any, gradient: Any) -> Array:
    return leaf


def _carrying_fwd(leaf: Array, states: Any, gradient: Any) -> tuple[Array, Any]:
    return leaf, gradient


def _carrying_bwd(gradient: Any, g: Array) -> tuple[Array, Any, None]:
    return g, gradient, None


_carrying.defvjp(_carrying_fwd, _carrying_bwd)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_one(uses: Array) -> Array:
    return as_float32(uses) == 1.0


def _nan_unless(valid: Array, state: Array) -> Array:
    """Return a state, nan if it is not valid; a state of integers stays."""
    if state.dtype == fp32_max_grad:  # which JAX cannot select
        return jax.lax.convert_element_type(jnp.where(valid, as_float32(state), jnp.nan), fp32_max_grad)
    return jnp.where(valid, state, jnp.nan) if jnp.issubdtype(state.dtype, jnp.floating) else state
