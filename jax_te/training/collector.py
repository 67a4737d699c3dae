"""Python's collector of cyclic garbage, while a train step is traced."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 50_000
"""Objects that are made until Python looks for garbage among them; its own number is 700 or 2,000, by its version."""


@contextlib.contextmanager
def collect_rarely() -> Iterator[None]:
    """Have Python look for cyclic garbage less often, in all threads, unless it does so already.

    A trace makes millions of objects, of which most stay. Looking through them again and again takes a fifth of it.
    """
    usual, *others = gc.get_threshold()
    if not 0 < usual < _NEW_OBJECTS:  # 0: the collector is off
        yield
        return
    try:
        gc.set_threshold(_NEW_OBJECTS, *others)
        yield
    finally:
        if gc.get_threshold()[0] == _NEW_OBJECTS:  # else somebody has set another number meanwhile
            gc.set_threshold(usual, *others)
