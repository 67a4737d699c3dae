"""Meetings: processes wait for each other, for a limited time, before they run a program together.

A wait in C++, such as that for a collective, cannot be ended from outside. A thread that is left in one aborts the
process if its wait ends while the interpreter does: it cannot take the interpreter's lock any more. So the waits here
are loops of Python in the caller's thread, and a program over the devices of all processes begins once all are there.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable

import jax

_NUMBERS = itertools.count()
"""Numbers of meetings, which all processes attend in the same order."""
_SHORTEST, _LONGEST = 0.0002, 0.05
"""Seconds between two looks at what a process waits for; the interval grows while it waits."""


def meet(seconds: float) -> None:
    """Return once all processes have called this.

    Args:
        seconds: seconds to wait for the others.

    Raises:
        TimeoutError: if one has not come by then. One that comes later does not find this process there.
        ValueError: if JAX's processes are not connected by ``jax.distributed.initialize``.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost  # here, since this import takes long, and most programs are one process

    client, number, index = multihost.get_jax_distributed_client(), next(_NUMBERS), jax.process_index()
    arrived, begun = (f"jax_te/meetings/{number}/{what}" for what in ("arrived", "begun"))
    client.key_value_set(f"{arrived}/{index}", "")
    try:
        if index == 0:
            wait_until(lambda: len(client.key_value_dir_get(arrived)) == jax.process_count(), seconds)
            client.key_value_set(f"{begun}/0", "")
            client.key_value_delete(f"jax_te/meetings/{number - 1}")  # all have left it
        else:
            wait_until(lambda: bool(client.key_value_dir_get(begun)), seconds)
    except TimeoutError:
        client.key_value_delete(f"{arrived}/{index}")
        raise


def wait_until(is_over: Callable[[], bool], seconds: float) -> None:
    """Return once a condition that other processes bring about holds.

    Args:
        is_over: function that returns whether the condition holds, such as ``is_ready`` of an array.
        seconds: seconds to wait.

    Raises:
        TimeoutError: if it does not hold by then.
    """
    deadline, interval = time.monotonic() + seconds, _SHORTEST
    while not is_over():
        if time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"process {jax.process_index()} waited {seconds:g} s for the others, of which one has ended, or is too "
                "slow",
            )
        time.sleep(interval)
        interval = min(2 * interval, _LONGEST)
