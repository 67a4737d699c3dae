"""Megatron's checkpointed call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_te.layers.internal import check_tp_group
from jax_te.random import RNGStatesTracker, StreamState
from jax_te.remat import checkpoint


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None,
    tp_group: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward_func(*args, **kwargs)``, computed again in backward: `jax_te.remat.checkpoint` in Megatron's words.

    The recipe of an ``autocast`` around the call holds in both passes, delayed scaling's scales are inputs of both, and
    its state gets its next value once.

    Args:
        forward_func: function of arrays and pytrees of arrays, or a module.
        distribute_saved_activations: keep the first array argument split over the tensor ranks.
        get_rng_state_tracker: gives the tracker whose streams ``forward_func`` forks: both passes draw the same, and
            the tracker is further on afterwards, as without the checkpoint. None: it forks none.
        tp_group: None or ``"tensor"``, the axis of the mesh that splits what is kept.
        *args, **kwargs: of ``forward_func``.

    Raises:
        TypeError: for another ``tp_group``, or a ``get_rng_state_tracker`` that does not give a tracker.
        ValueError: as `jax_te.remat.checkpoint`.

    Source: ``megatron.core.extensions.transformer_engine.te_checkpoint``.

    >>> loss = lambda x: te_checkpoint(jnp.sin, False, None, None, x).sum()
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    check_tp_group(tp_group)
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    if not (tracker is None or isinstance(tracker, RNGStatesTracker)):
        raise TypeError(f"get_rng_state_tracker must give a RNGStatesTracker, got {type(tracker).__name__}")
    call = functools.partial(
        checkpoint,
        *(functools.partial(_run, tracker), *args),
        distribute_saved_activations=distribute_saved_activations,
        forward_func=forward_func,
        kwargs=kwargs,
    )
    if tracker is None or not tracker.is_initialized():
        return call(states=None)[0]
    before = tracker.get_states()
    after = before
    try:
        result, after = call(states=before)
    finally:
        tracker.set_states(after)  # in the trace of the call: the function left those of its own there
    return result


def _run(
    tracker: RNGStatesTracker | None,
    *args: Any,
    forward_func: Callable[..., Any],
    kwargs: dict[str, Any],
    states: dict[str, StreamState] | None,
) -> tuple[Any, dict[str, StreamState] | None]:
    """The function's result and the states of the streams behind it."""
    if tracker is None or states is None:
        return forward_func(*args, **kwargs), None
    tracker.set_states(states)
    return forward_func(*args, **kwargs), tracker.get_states()
