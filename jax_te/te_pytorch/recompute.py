"""Recomputation in backward, with options in front of the function's arguments or as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax_te._validation import checked, log_hints, log_once
from jax_te.megatron import te_checkpoint
from jax_te.random import RNGStatesTracker
from jax_te.typing import TensorGroup


@checked
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None = None,
    get_cuda_rng_tracker: Callable[[], RNGStatesTracker] | None = None,
    tp_group: TensorGroup = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, which backward recomputes; see `jax_te.megatron.te_checkpoint`.

    As in Transformer Engine, the options may stand in front of the function's arguments:
    ``checkpoint(function, False, get_cuda_rng_tracker, None, x)``. They are read so, which is logged once, if the first
    argument is a bool, the second None or a function and the third None or a name, and the function does not take them.
    A function that takes the arguments with and without these three, such as one of ``*args``, is refused: give the
    options as keywords, or the function's own first arguments by ``functools.partial``.

    Args:
        function: function of arrays and pytrees of arrays, or a module.
        *args, **kwargs: arguments of ``function``.
        distribute_saved_activations, get_rng_state_tracker, tp_group: see `jax_te.megatron.te_checkpoint`.
        get_cuda_rng_tracker: the older name of ``get_rng_state_tracker``.
        use_reentrant: option without effect: it chooses among PyTorch's implementations.

    Raises:
        TypeError: for three arguments that may be options or the function's own; for options both in front and as
            keywords; for two trackers; see also `jax_te.megatron.te_checkpoint`.
        ValueError, RuntimeError: see `jax_te.megatron.te_checkpoint`.

    Source: ``transformer_engine.pytorch.checkpoint``.

    >>> loss = lambda x: checkpoint(jnp.sin, False, None, None, x).sum()
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    if None not in (get_rng_state_tracker, get_cuda_rng_tracker) and get_rng_state_tracker != get_cuda_rng_tracker:
        raise TypeError(
            "get_cuda_rng_tracker is the older name of get_rng_state_tracker, and both are given: "
            f"{get_cuda_rng_tracker!r} and {get_rng_state_tracker!r}; give one"
        )
    log_hints(use_reentrant=not use_reentrant)
    options: tuple[Any, ...] = (distribute_saved_activations, get_rng_state_tracker or get_cuda_rng_tracker, tp_group)
    if _options_in_front(function, args, kwargs):
        if options != (False, None, None):
            raise TypeError(
                f"checkpoint has options in front of the function's arguments, {args[:3]!r}, and as keywords, too; "
                "give them once"
            )
        log_once(
            "checkpoint(function, flag, tracker, group, ...) has the options of Transformer Engine in front of the "
            "function's arguments; as keywords they are distribute_saved_activations, get_rng_state_tracker and "
            "tp_group"
        )
        options, args = args[:3], args[3:]
    return te_checkpoint(function, *options, *args, **kwargs)


def _options_in_front(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the first three arguments are options of `checkpoint`, and not the function's own.

    Raises:
        TypeError: if they may be either.
    """
    # Transformer Engine takes them in front, too, as deprecated, and tells them by their types: its tracker is a
    # function, its group an object of PyTorch's. Here either may be None, as a function's own arguments may, so the
    # function's signature decides.
    if len(args) < 3:
        return False
    flag, tracker, group = args[:3]
    are_alike = isinstance(flag, bool) and (tracker is None or callable(tracker))
    if not are_alike or not (group is None or isinstance(group, str)):
        return False
    takes_all, takes_rest = _takes(function, args, kwargs), _takes(function, args[3:], kwargs)
    if takes_all and takes_rest:
        raise TypeError(
            f"checkpoint cannot tell whether {args[:3]!r} are its options or arguments of the function, which takes "
            "the others with and without them: give the options as keywords (distribute_saved_activations, "
            "get_rng_state_tracker, tp_group), or the function's first arguments by functools.partial(function, ...)"
        )
    return not takes_all


def _takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function's signature has a place for each of these arguments."""
    # A module's own arguments are those of its forward, where __call__ hands on whatever it is given.
    called = getattr(function, "forward", function)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # such as functions of other languages have none
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
