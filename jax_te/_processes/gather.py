"""What all processes of a program learn from each other: texts, and whether something went well in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_te._processes.meeting import Meetings

_BYTES = 400
"""Bytes of a text."""
_BOUND = 3600.0
"""Seconds for which a process waits for the others: what they do before, such as reading a checkpoint, may take one of
them far longer than another."""


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, in their order; all must call this, and texts are cut to 400 bytes.

    Raises:
        MissedMeeting: if a process has not called this within an hour of another.
        ValueError: if JAX's processes are not connected by ``jax.distributed.initialize``.
    """
    if jax.process_count() == 1:
        return [text]
    with Meetings("gather_texts", bound=_BOUND) as meetings:
        meetings.meet()  # a collective has no bound of its own
        sent = np.frombuffer(text.encode(errors="replace")[:_BYTES].ljust(_BYTES, b"\0"), np.uint8)
        received = multihost_utils.process_allgather(sent)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.asarray(received)]


class Attempt(NamedTuple):
    """What came of a function that every process has called.

    Args:
        result: what it returned in this process. None: it failed here.
        error: error that it raised in this process. None: it raised none here.
        texts: description of each process's error, in the order of the processes. Empty: it raised none there.
    """

    result: Any
    error: Exception | None
    texts: list[str]


def attempt(work: Callable[[], Any], describe: Callable[[Exception], str]) -> Attempt:
    """Call a function in every process, and return what came of it once all know that of the others.

    A process that raised at once would leave the others waiting for it at the next thing that they do together.

    Args:
        work: function to call.
        describe: function that returns the text by which the other processes learn of an error.
    """
    try:
        result, error, text = work(), None, ""
    except Exception as raised:
        result, error, text = None, raised, describe(raised)
    return Attempt(result, error, gather_texts(text))
