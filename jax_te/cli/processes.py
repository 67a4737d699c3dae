"""Several processes of one run: how they join, which one speaks, what they agree upon, how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jax_te.cli.launch import PLACE, Launch
from jax_te.cli.main import explain

_HEARTBEAT = 30
"""Seconds after which a process that is silent, such as one whose host is gone, ends the others."""
_FAREWELL = 1.0
"""Seconds in which the others can say why they end, before the first process does."""
_GONE = ("Gloo ", "NCCL operation", "ncclRemoteError", "coordination service", "CoordinationService")
"""Words of JAX's errors where another process is gone."""
_LONGEST = 400

T = TypeVar("T")


@contextlib.contextmanager
def joined(launch: Launch | None, *, debug: bool = False) -> Iterator[None]:
    """Yield in JAX's program of all processes. Where there are several, only the first one's stdout is shown.

    A process that fails says so in one line and ends at once, whatever the others are doing; they end when they miss
    it, and the same command resumes.

    Args:
        launch: of `find_launch`. None: one process, or those that are connected already.
        debug: show the traceback of an error.

    Raises:
        ValueError: if the processes do not find each other.
    """
    if launch is not None and not jax.distributed.is_initialized():
        _connect(launch)
    if jax.process_count() == 1:
        yield
        return
    try:
        with contextlib.ExitStack() as stack:
            if jax.process_index():
                silent = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silent))
            yield
    except Exception as error:
        _end(error, debug)


def _connect(launch: Launch) -> None:
    # Its handler would take SIGTERM from a run that is still starting; the loop has its own agreement.
    jax.config.update("jax_enable_preemption_service", False)
    given = {} if launch.coordinator is None else {"cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.count,
            launch.index if given else None,
            heartbeat_timeout_seconds=_HEARTBEAT,
            **given,  # type: ignore[arg-type]
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:_LONGEST]
        raise ValueError(
            f"the processes of the run did not find each other: {text}. Give {', '.join(PLACE)}, or --processes none "
            "for a run of this process alone"
        ) from error


def is_first() -> bool:
    """Return whether this is the process that writes files and messages."""
    return jax.process_index() == 0


def agreed(work: Callable[[], T]) -> T:
    """Return ``work()`` once it has gone well in every process; all must call this.

    Raises:
        Exception: what ``work`` raised here.
        ValueError: with the line of the first process in which it failed, if it did not fail here.
    """
    if jax.process_count() == 1:
        return work()
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    lines = _gathered("" if failure is None else _line(failure) or repr(failure))
    if failure is not None:
        raise failure
    for index, line in enumerate(lines):
        if line:
            raise ValueError(f"process {index}: {line}")
    return result  # type: ignore[return-value]


def check_same(**values: object) -> None:
    """Raise ValueError, in every process, if a value's text is not the same in all of them; all must call this."""
    if jax.process_count() == 1:
        return
    for name, value in values.items():
        found = _gathered(str(zlib.crc32(repr(value).encode())))
        if len(set(found)) > 1:
            other = next(index for index, text in enumerate(found) if text != found[0])
            raise ValueError(f"{name} of process {other} differs from process 0's; give all processes the same")


class SharedSignal:
    """Tells every process of the signal that one of them got, so that all end after the same step.

    All call it once a step, inside of ``jax.set_mesh``. It says what was heard before the step before: a tiny program
    behind each step finds the largest number over all devices, and is read when the device has done it, so that no
    process waits.
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


def _gathered(text: str) -> list[str]:
    sent = np.frombuffer(text.encode()[:_LONGEST].ljust(_LONGEST, b"\0"), np.uint8)
    return [
        bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.asarray(multihost_utils.process_allgather(sent))
    ]


def _line(error: Exception) -> str | None:
    link: BaseException | None = error
    while link is not None:
        if any(sign in str(link) for sign in _GONE):
            cause = " ".join(str(link).split())[:160]
            return f"another process ended or cannot be reached; the same command resumes ({cause})"
        link = link.__cause__ or link.__context__
    return explain(error)


def _end(error: Exception, debug: bool) -> None:
    """End this process, which cannot wait for others that wait for it."""
    text = None if debug else _line(error)
    if text is None:
        traceback.print_exc()
    else:
        line = f"jax-te: process {jax.process_index()} of {jax.process_count()}: error: {text}\n"
        os.write(2, line.encode(errors="replace"))
    sys.stderr.flush()
    if is_first():
        time.sleep(_FAREWELL)  # JAX aborts the others as soon as the first one is gone
    os._exit(1 if text is None else 2)
