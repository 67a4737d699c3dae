"""Several processes of one run: joining, output, agreement and orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_te._processes import HEARTBEAT_FOLDER, Heartbeats, attempt, gather_texts, is_first
from jax_te.cli.launch import PLACE, Bounds, Launch
from jax_te.cli.main import explain
from jax_te.cli.rendezvous import rendezvous

_LATER = 60
"""Seconds by which JAX's timeouts, at which it aborts in C++, exceed those of the run."""
_FAREWELL = 3.0
"""Seconds in which the others can report why they end, on a busy machine too, before the first process ends."""
_NOTICE = 10.0
"""Seconds of waiting after which a process reports for whom; repeated whenever that has doubled."""
_GONE = ("Gloo ", "NCCL operation", "ncclRemoteError", "coordination service", "CoordinationService")
"""Texts of JAX's errors when another process is gone."""
_LONGEST = 400
_OTHER, _RESUMES = "another process ended or cannot be reached", "; the same command resumes"
_NO_ANSWER = "the processes of the run have found each other, and now one does not answer"
_SEEN_WITHIN = 5.0
"""Seconds after which changes in a shared folder are visible to other hosts."""

T = TypeVar("T")


@contextlib.contextmanager
def joined(launch: Launch | None, output: Path, bounds: Bounds, *, debug: bool = False) -> Iterator[Heartbeats | None]:
    """Connect all processes in JAX, and yield their heartbeats; None if this process is the only one.

    Where there are several, only the first one's stdout is shown, and nothing that C++ libraries print there.

    A process that fails reports this in one line and ends at once, whatever the others are doing; they end when they
    notice it, and the same command resumes.

    Args:
        launch: launch of `find_launch`. None: one process, or processes that are connected already.
        output: folder of the run, in which the heartbeats are.
        bounds: timeouts of all waits.
        debug: whether to show the traceback of an error.

    Raises:
        ValueError: if the processes do not find each other.
    """
    if launch is not None and not jax.distributed.is_initialized():
        _connect(launch, bounds)
    if not jax.distributed.is_initialized():
        yield None
        return
    place = _find_place(launch, bounds, debug)
    if place.count == 1:
        yield None
        return
    heartbeats: Heartbeats | None = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_own_stdout())
            with _within(bounds.start, _NO_ANSWER, place):
                run = _shared_token(output, uuid.uuid4().hex[:12])
            every, guard = (bounds.save, bounds.step), _Guard(bounds.step, place)
            heartbeats = Heartbeats(output / HEARTBEAT_FOLDER, run, place.index, jax.process_count(), every, guard)
            heartbeats.start()
            yield heartbeats
    except Exception as error:
        # The heartbeats go on until then: they tell this process why, and the others.
        _end(error, debug, heartbeats, place)
    else:
        heartbeats.stop()


def _find_place(launch: Launch | None, bounds: Bounds, debug: bool) -> Launch:
    """Return this process's index and the count, once all processes have exchanged their lists of devices."""
    with _within(bounds.start, _NO_ANSWER, launch):
        try:
            # At its first question JAX exchanges the devices of all processes.
            return Launch(jax.process_index(), jax.process_count())
        except Exception as error:
            # Raised, it would end this process only after a wait for the others, which wait for it.
            _end(error, debug, None, launch)
            raise


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Yield with Python's stdout where it was, in the first process, and C++ libraries' stdout discarded."""
    sys.stdout.flush()
    with open(os.devnull, "w") as silent, contextlib.ExitStack() as stack:
        shown = silent
        try:
            number = sys.stdout.fileno()
        except (OSError, ValueError):  # of a program that has put something else there
            number = None
        if number is not None:
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(silent.fileno(), number)  # Gloo prints there
            if is_first():
                shown = stack.enter_context(open(os.dup(kept), "w", buffering=1, errors="replace"))
        elif is_first():
            shown = sys.stdout
        stack.enter_context(contextlib.redirect_stdout(shown))
        yield


@contextlib.contextmanager
def _within(seconds: float, what: str, place: Launch | None) -> Iterator[None]:
    """Yield, and end this process with a line if the block exceeds the timeout, since waits in C++ cannot be
    interrupted."""
    timer = threading.Timer(seconds, lambda: _leave(f"{what} for {seconds:g} s; the same command resumes", place))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shared_token(output: Path, token: str) -> str:
    """Return process 0's token, and make sure that all processes see it in the folder of the run.

    Raises:
        ValueError: in all of them, if one does not.
    """
    token = gather_texts(token)[0]
    mark = output / f".{token}"  # a name that was never requested, so that no cache has an answer

    def look() -> None:
        deadline = time.monotonic() + _SEEN_WITHIN
        while not mark.exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"--output {output.absolute()} is not the folder of process 0, whose mark is not there; give all "
                    "processes the same folder, on a file system that they share"
                )
            time.sleep(0.1)

    def make() -> None:
        output.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)

    agreed(make if is_first() else bool)
    try:
        agreed(look)
    finally:
        if is_first():
            mark.unlink(missing_ok=True)
    return token


class _Guard:
    """Ends this process when it waits for others in vain, and reports which ones it waits for.

    `Heartbeats` calls it in its thread, after each look at the other processes.
    """

    def __init__(self, bound: float, place: Launch):
        self._place = place
        self._bound, self._first_notice = bound, min(_NOTICE, bound / 2)
        self._notice = self._first_notice

    def __call__(self, heartbeats: Heartbeats) -> None:
        problem = heartbeats.find_problem(self._bound)
        if problem is not None:
            _leave(f"{problem}; the same command resumes", self._place, heartbeats)
        behind, waited = heartbeats.processes_behind(), heartbeats.seconds_waited()
        if not behind or waited < self._first_notice:
            self._notice = self._first_notice
        elif waited > self._notice and (is_first() or behind[0][0] == 0):
            self._notice *= 2
            whom = ", ".join(f"process {index} ({doing})" for index, doing in behind[:8])
            os.write(2, f"jax-te: waiting for {whom}, {waited:.0f} s so far\n".encode(errors="replace"))


def _connect(launch: Launch, bounds: Bounds) -> None:
    rendezvous(
        launch, bounds.start, lambda line: print(line, file=sys.stderr if launch.index else sys.stdout, flush=True)
    )
    # JAX's handler would intercept SIGTERM in a run that is still starting; the loop has its own agreement.
    jax.config.update("jax_enable_preemption_service", False)
    given = {} if launch.coordinator is None else {"cluster_detection_method": "deactivate"}
    if not given and launch.index == 0:
        print("waiting for the other processes, where JAX finds them", flush=True)
    try:
        with _within(bounds.start, "the processes of the run have not found each other", launch):
            jax.distributed.initialize(
                launch.coordinator,
                launch.count,
                launch.index if given else None,
                initialization_timeout=int(bounds.start) + _LATER,
                heartbeat_timeout_seconds=int(max(bounds)) + _LATER,
                shutdown_timeout_seconds=int(bounds.step) + 1,
                **given,  # type: ignore[arg-type]
            )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:_LONGEST]
        raise ValueError(
            f"the processes of the run did not find each other: {text}. Give {', '.join(PLACE)}, or --processes none "
            "for a run of this process alone"
        ) from error


def agreed(work: Callable[[], T]) -> T:
    """Return ``work()`` once it has succeeded in every process; all must call this.

    Raises:
        Exception: what ``work`` raised here.
        ValueError: with the line of the first process in which it failed, if it did not fail here.
    """
    if jax.process_count() == 1:
        return work()
    result, failure, failures = attempt(work, lambda error: _line(error) or repr(error))
    if failure is not None:
        raise failure
    for index, other in enumerate(failures):
        if other is not None:
            raise ValueError(f"process {index}: {other.text}")
    return result


class SharedSignal:
    """Tells every process of the signal that one of them got, so that all end after the same step.

    All call it once a step, inside of ``jax.set_mesh``. The result is delayed by a step: a tiny program after each step
    takes the maximum over all devices, and is read when the device has finished it, so that no process waits.
    """

    def __init__(self) -> None:
        mesh = jax.sharding.get_mesh()
        self._over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._told: jax.Array | None = None

    def __call__(self, heard: signal.Signals | None) -> signal.Signals | None:
        before, value = self._told, np.full(1, heard or 0, np.int32)
        shape = (self._over_all.mesh.size,)
        self._told = self._largest(jax.make_array_from_callback(shape, self._over_all, lambda _: value))
        number = 0 if before is None else int(before)
        return signal.Signals(number) if number else None


def _line(error: Exception) -> str | None:
    link: BaseException | None = error
    while link is not None:
        if any(sign in str(link) for sign in _GONE):
            cause = " ".join(str(link).split())[:160]
            return f"{_OTHER}; the same command resumes ({cause})"
        link = link.__cause__ or link.__context__
    return explain(error, "train")  # the one command of several processes


def _end(error: Exception, debug: bool, heartbeats: Heartbeats | None, place: Launch | None) -> None:
    """End this process, which cannot wait for others that wait for it."""
    text = None if debug else _line(error)
    if text is None:
        traceback.print_exc()
    if heartbeats is not None and text is not None and text.startswith(_OTHER):
        deadline = time.monotonic() + 3 * heartbeats.interval  # its own message says more, if there is one
        while heartbeats.reported_error() is None and time.monotonic() < deadline:
            time.sleep(heartbeats.interval / 4)
        text = (
            text if heartbeats.reported_error() is None else f"{heartbeats.reported_error()}; the same command resumes"
        )
    _leave(text, place, heartbeats, 1 if text is None else 2, _line(error) or repr(error))


_LEAVING = threading.Lock()


def _leave(
    text: str | None,
    place: Launch | None,
    heartbeats: Heartbeats | None = None,
    status: int = 2,
    told: str | None = None,
) -> None:
    """End this process at once, with a line for its user and one for the other processes, which end, too.

    Args:
        text: line for the user. None: a traceback has been shown.
        place: index of this process, and the count. It is given, since JAX would wait for a process that is gone until
            all have sent their devices. None: unknown.
        heartbeats: heartbeats of the run. None: they have not begun.
        status: exit status.
        told: line for the other processes. None: ``text``.
    """
    _LEAVING.acquire()  # for good: the loop and the guard may both find that it is over
    if text is not None:
        os.write(2, f"jax-te: {_shown(place)}error: {text}\n".encode(errors="replace"))
    sys.stderr.flush()
    if heartbeats is not None and place is not None:
        heartbeats.fail(heartbeats.reported_error() or f"process {place.index}: {told or text}".removesuffix(_RESUMES))
    if place is None or place.index == 0:
        # JAX aborts the others as soon as the first one is gone.
        time.sleep(_FAREWELL + (2 * heartbeats.interval if heartbeats is not None else 0.0))
    os._exit(status)


def _shown(place: Launch | None) -> str:
    if place is None or not jax.distributed.is_initialized():
        return ""
    return f"process {place.index}: " if place.count is None else f"process {place.index} of {place.count}: "
