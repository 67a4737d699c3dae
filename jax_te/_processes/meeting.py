"""Meetings: processes wait for each other, for a limited time, and then all go on, or all raise.

A wait in C++, such as that for a collective, cannot be ended from outside. A thread that is left in one aborts the
process if its wait ends while the interpreter does: it cannot take the interpreter's lock any more. So a program over
the devices of all processes begins once all have met, and the waits here are short ones in the caller's thread.

The processes meet at JAX's coordination service, a store of texts in process 0 whose keys are written once. Each writes
for a meeting that it is there, or which problem it has, and what it tells the others. Process 0 reads that, and writes
the outcome, with what all have told. A process that has waited in vain writes another outcome. The first one written
counts for all, so that none goes on alone.
"""

from __future__ import annotations

import errno
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_te._processes.first import is_first
from jax_te._processes.heartbeats import shortened

_BOUND = 600.0
"""Seconds for which a process waits for the others."""
_SLICE = 2.0
"""Seconds of one question to the store: the longest time for which a process does not react to Ctrl-C."""
_ANSWER = 10.0
"""Seconds after which process 0, asked for a text that it has, counts as stopped."""
_PART = 2**18
"""Characters of a text under one key: the store takes messages of some megabytes."""
_SHORTEST, _LONGEST = 0.0002, 0.05
"""Seconds between two looks at an array that is being computed; the interval grows meanwhile."""
_TEXT = 400
"""Maximum number of characters of a problem that are sent to the other processes."""
_MISSED = "missed: "
"""Begin of an outcome's problem by which a process was waited for in vain."""

_CALLS = Counter[str]()
"""Number of calls so far by their name, the same in all processes: a part of the keys, which are written once."""


class _Outcome(NamedTuple):
    """Outcome of a meeting.

    Args:
        problem: reason why the processes cannot go on. Empty: they can.
        texts: texts that the processes have told, in their order.
    """

    problem: str
    texts: Sequence[str] = ()


class MissedMeeting(TimeoutError):
    """A process that was waited for in vain. Not any TimeoutError: those of a file system are problems like others."""

    def __init__(self, text: str):
        super().__init__(errno.ETIMEDOUT, text)


class Meetings:
    """A call that all processes make together, and its meetings.

    If one process leaves the ``with`` block by an error, the others raise at their next meeting. A failed call does not
    disturb later ones, and calls of different names never meet each other.

    Args:
        name: name of the call.
        bound: seconds for which a process waits for the others. None: ten minutes.

    >>> with Meetings("save_huggingface") as meetings:
    ...     meetings.meet()
    """

    def __init__(self, name: str, *, bound: float | None = None):
        self._given_bound = bound
        self._name, self._number, self._agreed = name, 0, False
        self._call = f"jax_te/{name}/{_CALLS[name]}"
        self._outdated = f"jax_te/{name}/{_CALLS[name] - 1}"
        _CALLS[name] += 1

    def __enter__(self) -> Meetings:
        if jax.process_count() > 1 and is_first():
            _client().key_value_set(f"{self._call}/open", "")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or self._agreed or jax.process_count() == 1:
            return
        text = f"{self._name} failed in process {jax.process_index()}: {type(error).__name__}: {error}"
        text = text.encode(errors="replace").decode()  # a path may have half of a surrogate pair
        self._attend(shortened(text, _TEXT))

    def meet(self) -> None:
        """Return once all processes are here.

        Raises:
            MissedMeeting: if one has not come within the bound. One that comes later raises it, too.
            OSError: if another process has failed since the last meeting, or cannot go on.
            ValueError: if JAX's processes are not connected by ``jax.distributed.initialize``.
        """
        self.gather("")

    def gather(self, text: str) -> list[str]:
        """Return the texts of all processes in their order, once all are here.

        Args:
            text: short text of this process. Those of all together are under one key, and the store takes messages of
                some megabytes; `share` takes a text of any length.

        Raises:
            MissedMeeting, OSError, ValueError: see `meet`.
        """
        if jax.process_count() == 1:
            return [text]
        outcome = self._attend("", text)
        if outcome.problem:
            self._agreed = True  # nothing is to be told
            if outcome.problem.startswith(_MISSED):
                raise MissedMeeting(outcome.problem.removeprefix(_MISSED))
            raise OSError(errno.EIO, outcome.problem)
        return [*outcome.texts]

    @property
    def _bound(self) -> float:
        return _BOUND if self._given_bound is None else self._given_bound

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Return once a condition that other processes bring about holds.

        Args:
            is_over: function that returns whether the condition holds, such as ``is_ready`` of an array.

        Raises:
            MissedMeeting: if it does not hold within the bound.
        """
        deadline, interval = time.monotonic() + self._bound, _SHORTEST
        while not is_over():
            if time.monotonic() > deadline:
                raise MissedMeeting(self._waited_for("the others"))
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST)

    def _attend(self, problem: str, text: str = "") -> _Outcome:
        """Take part in the next meeting, and return its outcome.

        Args:
            problem: reason why this process cannot go on. With one it does not wait for the others.
            text: text that it tells the others.
        """
        meeting, deadline = f"{self._call}/{self._number}", time.monotonic() + self._bound
        if problem and self._number:  # before the first meeting, process 0 may not have begun the call
            deadline = time.monotonic() + _ANSWER
        self._number += 1
        try:
            if not is_first():
                self._write(f"{meeting}/{jax.process_index()}", json.dumps([problem, text]), deadline)
                return _Outcome(problem) if problem else self._read_outcome(meeting, deadline)
            if problem:
                return self._settle(meeting, _Outcome(problem))
            others = range(1, jax.process_count())
            told = [json.loads(self._read(f"{meeting}/{other}", deadline, other)) for other in others]
            _client().key_value_delete(self._outdated)  # all have left it
            self._outdated = meeting
            problems = [theirs for theirs, _ in told if theirs]
            outcome = _Outcome(problems[0]) if problems else _Outcome("", [text, *(theirs for _, theirs in told)])
            return self._settle(meeting, outcome)
        except MissedMeeting as missed:
            return self._settle(meeting, _Outcome(f"{_MISSED}{missed.strerror}"))

    def _settle(self, meeting: str, outcome: _Outcome) -> _Outcome:
        """Write the outcome of a meeting unless there is one, and return the one that counts."""
        deadline = time.monotonic() + _ANSWER
        try:
            written = self._write(f"{meeting}/outcome", json.dumps(outcome), deadline)
            return outcome if written else self._read_outcome(meeting, deadline)
        except MissedMeeting:
            return outcome  # process 0 does not answer, and this process cannot go on without it

    def _read_outcome(self, meeting: str, deadline: float) -> _Outcome:
        return _Outcome(*json.loads(self._read(f"{meeting}/outcome", deadline, 0)))

    def _write(self, key: str, text: str, deadline: float) -> bool:
        """Write a text unless the key has one, and return whether it was written."""
        if not is_first():
            # A write waits for process 0 without a bound, so this process asks first whether it answers.
            self._read(f"{self._call}/open", deadline, 0)
        try:
            _client().key_value_set(key, text)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise self._lost_process_0(error) from error
            return False
        return True

    def _read(self, key: str, deadline: float, other: int) -> str:
        """Return a text once it is written.

        Args:
            key: key of the text.
            deadline: time until which this process waits.
            other: index of the process that writes it, for the error.

        Raises:
            MissedMeeting: if it is not there by then, or if the store fails.
        """
        while True:
            seconds = max(0.001, min(deadline - time.monotonic(), _SLICE))
            try:
                return _client().blocking_key_value_get(key, int(1000 * seconds))
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise self._lost_process_0(error) from error
            if time.monotonic() > deadline:
                raise MissedMeeting(self._waited_for(f"process {other}"))

    def _lost_process_0(self, error: RuntimeError) -> MissedMeeting:
        """Return the error for an answer of the store, which is in process 0, that is no text."""
        return MissedMeeting(f"process {jax.process_index()} lost process 0 in {self._name}: {error}")

    def _waited_for(self, others: str) -> str:
        return (
            f"process {jax.process_index()} waited {self._bound:g} s for {others} in {self._name}, in vain: a process "
            "has ended, or is too slow"
        )

    def share(self, text: str, source: int) -> str:
        """Return the text of process ``source``, of any length, once all are here; raises like `meet`."""
        if jax.process_count() == 1:
            return text
        place = f"{self._call}/{self._number}/shared"  # deleted with the meeting's other keys
        if jax.process_index() == source:
            self._put(place, text)
        self.meet()
        return text if jax.process_index() == source else self._get(place, source)

    def _put(self, place: str, text: str) -> None:
        """Write a text in parts."""
        deadline = time.monotonic() + self._bound
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)] or [""]
        for number, part in enumerate(parts):
            self._write(f"{place}/{number}", part if number else f"{len(parts)} {part}", deadline)

    def _get(self, place: str, other: int) -> str:
        """Return a text that process ``other`` has put there."""
        deadline = time.monotonic() + self._bound
        count, _, first = self._read(f"{place}/0", deadline, other).partition(" ")
        return first + "".join(self._read(f"{place}/{number}", deadline, other) for number in range(1, int(count)))


def _client() -> Any:
    """Return this process's client of JAX's coordination service, for which JAX has no public name."""
    from orbax.checkpoint import multihost  # here, since this import takes long, and most programs are one process

    return multihost.get_jax_distributed_client()
