"""Megatron's checkpointed call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_te._validation import checked
from jax_te.layers import check_tp_group
from jax_te.random import RNGStatesTracker, StreamState
from jax_te.remat import remat
from jax_te.typing import TensorGroup


@checked
def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None,
    tp_group: TensorGroup,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return ``forward_func(*args, **kwargs)``, which backward recomputes; see `jax_te.remat.remat`.

    The recipe of an ``autocast`` around the call applies to both passes, delayed scaling's scales are inputs of both,
    and its state gets its next value once.

    Args:
        forward_func: function of arrays and pytrees of arrays, or a module.
        distribute_saved_activations: whether to save the first array argument sharded over the tensor axis.
        get_rng_state_tracker: function that returns the tracker whose streams ``forward_func`` forks. Both passes draw
            the same keys, and the tracker advances as it would without the checkpoint. None: ``forward_func`` forks no
            stream.
        tp_group: None or ``"tensor"``, the mesh axis over which the saved argument is sharded.
        *args, **kwargs: arguments of ``forward_func``.

    Raises:
        TypeError: for another ``tp_group``, a ``distribute_saved_activations`` that is not True or False, or a
            ``get_rng_state_tracker`` that does not return a tracker.
        ValueError: see `jax_te.remat.remat`.
        RuntimeError: if ``forward_func`` forks a stream of a tracker from outside of the function that is being traced.

    Source: ``megatron.core.extensions.transformer_engine.te_checkpoint``.

    >>> loss = lambda x: te_checkpoint(jnp.sin, False, None, None, x).sum()
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    check_tp_group(tp_group)
    # Called outside of the checkpointed function, whose argument the tracker's states are.
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    if not (tracker is None or isinstance(tracker, RNGStatesTracker)):
        raise TypeError(f"get_rng_state_tracker must give a RNGStatesTracker, got {type(tracker).__name__}")
    call = functools.partial(
        remat,
        *(functools.partial(_run, tracker), *args),
        distribute_saved_activations=distribute_saved_activations,
        forward_func=forward_func,
        kwargs=kwargs,
    )
    # A tracker from outside of the trace is left unchanged: as a constant, its states would apply to every later call.
    # The function's own fork then raises.
    if tracker is None or not tracker.is_initialized() or not tracker.belongs_here():
        return call(states=None)[0]
    # States are an argument and a result: jax.checkpoint runs the function in its own trace, and a tracker's states
    # belong to one trace.
    before = tracker.get_states()
    after = before
    try:
        result, after = call(states=before)
    finally:
        tracker.set_states(after)  # the function left tracers of its own trace there, also if it raised
    return result


def _run(
    tracker: RNGStatesTracker | None,
    *args: Any,
    forward_func: Callable[..., Any],
    kwargs: dict[str, Any],
    states: dict[str, StreamState] | None,
) -> tuple[Any, dict[str, StreamState] | None]:
    """Return the function's result and the states of the streams after it."""
    if tracker is None or states is None:
        return forward_func(*args, **kwargs), None
    tracker.set_states(states)
    return forward_func(*args, **kwargs), tracker.get_states()
