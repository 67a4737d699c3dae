"""Where a model's stack of layers begins and ends: a hook in its call, by which a pipeline cuts the model there."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax_te.typing import Array


class StackCall(NamedTuple):
    """A call of a stack of layers.

    Args:
        run: ``run(layers, x, keys, **options) -> y``, which runs layers.
        layers: layers of the whole stack.
        x: ``[b, s, h]``, the first layer's input.
        keys: a dropout key for each layer, or None for each.
        options: the other arguments, the same for all layers.
    """

    run: Callable[..., Array]
    layers: Sequence[Any]
    x: Array
    keys: Sequence[Array | None]
    options: dict[str, Any]


# Read while a model is traced. Each thread has its own.
_hook: contextvars.ContextVar[Callable[[StackCall], Array] | None] = contextvars.ContextVar("stack_hook", default=None)


def stack_of_layers(run: Callable[..., Array]) -> Callable[..., Array]:
    """Return ``run(layers, x, keys, **options)``, whose calls reach the hook of `replace_stack` where there is one."""

    @functools.wraps(run)
    def call(layers: Sequence[Any], x: Array, keys: Sequence[Array | None], **options: Any) -> Array:
        hook = _hook.get()
        return run(layers, x, keys, **options) if hook is None else hook(StackCall(run, layers, x, keys, options))

    return call


@contextlib.contextmanager
def replace_stack(hook: Callable[[StackCall], Array]) -> Iterator[None]:
    """Yield with ``hook(call)`` in place of every stack of layers that is called inside."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


class _Reached(Exception):
    """Carries a stack's call out of the model around it."""

    def __init__(self, call: StackCall):
        self.call = call


def call_of_stack(fn: Callable[[], Any]) -> StackCall | None:
    """Return the call of the first stack of layers that ``fn`` runs, which ends there; None if it runs none."""

    def stop(call: StackCall) -> Array:
        raise _Reached(call)

    with replace_stack(stop):
        try:
            fn()
        except _Reached as reached:
            return reached.call
    return None
