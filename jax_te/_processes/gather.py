"""Exchange between all processes of a program: of texts, and of errors that a call has raised in one of them."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_te._processes.heartbeats import shortened
from jax_te._processes.meeting import Meetings

_BOUND = 3600.0
"""Seconds for which a process waits for the others: what they do before, such as reading a checkpoint, may take one of
them far longer than another."""
_TEXT = 400
"""Maximum number of characters of an error that are sent to the other processes."""


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, in their order; all must call this.

    Args:
        text: short text of this process. Those of all together go through one key of process 0's store, which takes
            messages of some megabytes; `Meetings.share` takes a text of any length.

    Raises:
        MissedMeeting: if a process has not called this within an hour of another.
        ValueError: if JAX's processes are not connected by ``jax.distributed.initialize``.
    """
    if jax.process_count() == 1:
        return [text]
    with Meetings("gather_texts", bound=_BOUND) as meetings:
        return meetings.gather(text)


def check_same(values: Mapping[str, object], devices: Iterable[Any] | None = None) -> None:
    """Raise ValueError, in every process, if a value's text is not the same in all of them; all must call this.

    Args:
        values: values by what a message calls them.
        devices: devices for which the values are. If they are not of all processes, which then need not call this,
            nothing is compared. None: those of all.

    Raises:
        ValueError: also if JAX's processes are not connected by ``jax.distributed.initialize``. If ``devices`` are
            given, nothing is compared then: programs on TPUs run without.
    """
    if jax.process_count() == 1:
        return
    if devices is not None:
        of_all = len({device.process_index for device in devices}) == jax.process_count()
        if not of_all or not jax.distributed.is_initialized():
            return
    checksums = {name: zlib.crc32(repr(value).encode()) for name, value in values.items()}
    first, *others = [json.loads(text) for text in gather_texts(json.dumps(checksums))]
    for index, theirs in enumerate(others, start=1):
        differing = ", ".join(name for name in first if theirs[name] != first[name])
        if differing:
            raise ValueError(f"process {index} has another {differing} than process 0; give all processes the same")


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """Return a checksum of arrays' bytes, the same for equal arrays in each process."""
    return functools.reduce(lambda crc32, array: zlib.crc32(np.ascontiguousarray(array), crc32), arrays, 0)


class Failure(NamedTuple):
    """Error of a process, as the others receive it.

    Args:
        text: description of it, shortened.
        is_expected: whether it is one of those that the caller expects.
    """

    text: str
    is_expected: bool


class Attempt(NamedTuple):
    """Result of a function that every process has called, and the errors that it raised.

    Args:
        result: its result in this process. None: it failed here.
        error: error that it raised in this process. None: it raised none here.
        failures: each process's error, in the order of the processes. None: it raised none there.
    """

    result: Any
    error: Exception | None
    failures: list[Failure | None]


def attempt(
    work: Callable[[], Any],
    describe: Callable[[Exception], str] = str,
    expected: type[Exception] | tuple[type[Exception], ...] = (),
) -> Attempt:
    """Call a function in every process, and return what came of it once all know that of the others.

    A process that raised at once would leave the others waiting for it at the next thing that they do together.

    Args:
        work: function to call.
        describe: function that returns the text by which the other processes learn of an error.
        expected: classes of errors that the caller expects, by which the others tell them from all other errors.
    """
    result, error, failure = None, None, None
    try:
        result = work()
    except Exception as raised:
        error, failure = raised, Failure(shortened(describe(raised), _TEXT), isinstance(raised, expected))
    told = map(json.loads, gather_texts(json.dumps(failure)))
    return Attempt(result, error, [None if each is None else Failure(*each) for each in told])
