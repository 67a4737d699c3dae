"""States of calls without a recipe: the gradient of such a state is the state, so that a loop keeps it."""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_vjp
def with_states_kept(result: Any, states: Any) -> Any:
    """Return ``result``; the gradient of ``states``, which nothing else of the call reads, is the states themselves.

    In Linen the gradient of a state is its next value. Without this it would be 0 after a step outside of the recipe,
    and the next step under it would compute with scales of 0.
    """
    return result


def _fwd(result: Any, states: Any) -> tuple[Any, Any]:
    return result, states


def _bwd(states: Any, g: Any) -> tuple[Any, Any]:
    return g, states


with_states_kept.defvjp(_fwd, _bwd)
