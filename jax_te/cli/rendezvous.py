"""Rendezvous of a run's processes at the port of the first one, before JAX connects them there."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from jax_te.cli.launch import Launch

_PAUSE = 0.2
"""Seconds between two attempts to reach process 0."""
_QUIET_SECONDS = 1.0
"""Seconds before a process reports that it waits, so that a start without delay is silent."""
_NAME = b"jax_te"


def rendezvous(launch: Launch, bound: float, say: Callable[[str], None]) -> None:
    """Wait until all processes of a run with a known coordinator have reached process 0.

    JAX would wait silently for as long, and then abort.

    Args:
        launch: launch with a coordinator and a count.
        bound: seconds in which no further process comes.
        say: function that shows a line about the wait.

    Raises:
        ValueError: if one does not come in time, or has the number or the count of another run.
    """
    if launch.coordinator is None or launch.count is None:
        return
    if launch.index == 0:
        _accept_all(launch.coordinator, launch.count, bound, say)
    else:
        _report_to(launch.coordinator, launch.index, launch.count, bound, say)


def _accept_all(coordinator: str, count: int, bound: float, say: Callable[[str], None]) -> None:
    came: dict[int, socket.socket] = {}
    seen: set[int] = set()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(coordinator))
        begin = last = time.monotonic()
        said = -1
        while len(came) < count - 1:
            now = time.monotonic()
            missing = [index for index in range(1, count) if index not in came]
            if now - last > bound:
                raise ValueError(
                    f"{len(came) + 1} of {count} processes came to {coordinator}, and none for {bound:g} s; missing: "
                    f"{_listed(missing)}. Start them, see what they say, or raise --start-timeout"
                )
            if now - begin > _QUIET_SECONDS and said != len(came):
                said = len(came)
                say(f"waiting for {count} processes at {coordinator}: {said + 1} are there, not {_listed(missing)}")
            for index, visitor in list(came.items()):
                try:
                    visitor.sendall(b"\n")  # a heartbeat
                except OSError:
                    del came[index]
            with contextlib.suppress(TimeoutError, ConnectionError):
                visitor = stack.enter_context(server.accept()[0])
                index = _number_of(visitor, count)
                if index is not None:
                    # One that comes again, such as one that fails and is restarted, does not bring the others.
                    last = last if index in seen else time.monotonic()
                    came[index] = visitor
                    seen.add(index)
        for visitor in came.values():
            with contextlib.suppress(OSError):
                visitor.sendall(_NAME + b" go\n")
                visitor.shutdown(socket.SHUT_WR)
        # The side that closes first blocks the port for minutes; JAX's service needs it.
        for visitor in came.values():
            with contextlib.suppress(OSError):
                visitor.recv(1)


def _number_of(visitor: socket.socket, count: int) -> int | None:
    """Return the index of a process of this run; None for any other connection to the port.

    Raises:
        ValueError: for a process of a run with another count.
    """
    visitor.settimeout(1.0)
    with contextlib.suppress(OSError, ValueError):
        name, index, of = visitor.recv(100).split()
        visitor.settimeout(_PAUSE)
        if name == _NAME and int(of) == count:
            return int(index) if 0 < int(index) < count else None
        if name == _NAME:
            visitor.sendall(_NAME + f" process 0 is one of {count}, and this one of {int(of)}\n".encode())
    return None


def _report_to(coordinator: str, index: int, count: int, bound: float, say: Callable[[str], None]) -> None:
    host, _, port = coordinator.rpartition(":")
    begin = last = time.monotonic()
    said = False
    answered = False
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5.0) as link:
            link.sendall(_NAME + f" {index} {count}\n".encode())
            answer, answered = _answer(link, bound), True
            if answer == "go":
                return
            if answer is not None:
                raise ValueError(f"the processes do not belong together: {answer}; give all the same number of them")
        now = time.monotonic()
        if now - begin > _QUIET_SECONDS and not said:
            said = True
            say(f"process {index} of {count} waits for process 0 at {coordinator}")
        if now - last > bound:
            what = "answers, but is not process 0 of this run" if answered else "cannot be reached"
            raise ValueError(
                f"{coordinator} {what}, for {bound:g} s. Start process 0 there, see what it says, or raise "
                "--start-timeout"
            )
        time.sleep(_PAUSE)


def _answer(link: socket.socket, bound: float) -> str | None:
    """Return process 0's answer once all have joined; None if it ends, or another program answers."""
    # Empty lines are its heartbeats; it counts from the last process that came.
    link.settimeout(bound)
    received = b""
    while not received.strip() or not received.endswith(b"\n"):
        more = link.recv(200)
        if not more:
            return None
        received = (received + more)[-1000:]
    name, _, text = received.strip().partition(b" ")
    return text.decode(errors="replace") if name == _NAME else None


def _server(coordinator: str) -> socket.socket:
    given = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")  # which JAX uses for its service
    host, _, port = (given or f":{coordinator.rpartition(':')[2]}").rpartition(":")
    host = host.strip("[]")
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, int(port)), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at {coordinator} ({error.strerror or error}); give an address of this host and "
            "a port that is free, or end what uses it"
        ) from None
    server.settimeout(_PAUSE)
    return server


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
