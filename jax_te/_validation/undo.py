"""Changes of state that are undone if the call that made them raises."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Undos(threading.local):
    """Functions that undo the changes of the calls that run in this thread, that of the last change last."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.depth = 0


_undos = _Undos()


@contextlib.contextmanager
def undoing() -> Iterator[None]:
    """Return a context that undoes the changes made in it if it raises, by the functions given to `on_failure`.

    >>> given = []
    >>> with contextlib.suppress(ValueError), undoing():
    ...     given.append(1)
    ...     on_failure(given.clear)
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


def on_failure(undo: Callable[[], None]) -> None:
    """Have a change undone by calling ``undo`` if the innermost context of `undoing` around it, or one around that,
    raises; without such a context do nothing.
    """
    if _undos.depth:
        _undos.steps.append(undo)
