"""Changes of state that are undone if the call that made them raises."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Undos(threading.local):
    """How to undo what the calls that run in this thread have changed, the last change last."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.depth = 0


_undos = _Undos()


@contextlib.contextmanager
def undone_if_raised() -> Iterator[None]:
    """Return a context that undoes the changes in it, as `to_undo` says how, if it raises.

    >>> given = []
    >>> with contextlib.suppress(ValueError), undone_if_raised():
    ...     given.append(1)
    ...     to_undo(given.clear)
    ...     raise ValueError
    >>> given
    []
    """
    before = len(_undos.steps)
    _undos.depth += 1
    try:
        yield
    except BaseException:
        while len(_undos.steps) > before:
            _undos.steps.pop()()
        raise
    finally:
        _undos.depth -= 1
        if not _undos.depth:
            _undos.steps.clear()


def to_undo(undo: Callable[[], None]) -> None:
    """Have a function called if a context of `undone_if_raised` around the caller raises."""
    if _undos.depth:
        _undos.steps.append(undo)
