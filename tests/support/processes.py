"""One job in several processes, each with devices of its own, that reach each other through JAX's collectives.

>>> run_processes(2, jax.process_index)
[Finished(result=0, output=''), Finished(result=1, output='')]
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).parents[2]
LINES = 40
"""How many of a process's last lines an error shows."""


class Finished(NamedTuple):
    """What a process returned, and what it wrote to stdout and stderr."""

    result: Any
    output: str


class ProcessError(AssertionError):
    """A process failed, or did not end in time; the message has its number and last lines."""


def run_processes(
    count: int,
    work: Callable[..., Any] | Path,
    args: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    devices: int = 1,
) -> list[Finished]:
    """Return what each of ``count`` processes came to, in their order.

    They are one JAX program on CPU: ``jax.devices()`` are the devices of all, and collectives go through Gloo.

    Args:
        count: number of processes.
        work: a function of a module's top level, which is imported in each process; or a script's path.
        args: of the function, by value, as its result; or the script's ``sys.argv[1:]``, as text. A script's result is
            its global ``result``.
        timeout: seconds, from when all have reached each other, after which all are killed.
        devices: of each process.

    Raises:
        ProcessError: if a process ended with another status than 0, or not in time. None is left running.
    """
    with tempfile.TemporaryDirectory(prefix="processes-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        job = work if isinstance(work, Path) else (work.__module__, work.__qualname__)
        (folder / "job").write_bytes(pickle.dumps((job, tuple(args), _free_port())))
        running = [stack.enter_context(_started(index, count, devices, folder)) for index in range(count)]
        # The start is left out: imports take long on a busy machine, and JAX itself limits the wait for the others.
        begin = None
        while any(process.poll() is None for process in running):
            _raise_for_failed(running, folder)
            if begin is None and all((folder / f"{index}.ready").exists() for index in range(count)):
                begin = time.monotonic()
            if begin is not None and time.monotonic() > begin + timeout:
                raise ProcessError(_late(running, folder, timeout))
            time.sleep(0.02)
        _raise_for_failed(running, folder)
        return [Finished(pickle.loads((folder / f"{i}.result").read_bytes()), _output(folder, i)) for i in range(count)]


@contextlib.contextmanager
def _started(index: int, count: int, devices: int, folder: Path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.support.processes", *map(str, (index, count, devices, folder))]
    with (folder / f"{index}.log").open("w") as log:
        # A session of its own: what the process starts ends with it.
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _raise_for_failed(running: list[subprocess.Popen], folder: Path) -> None:
    failed = [index for index, process in enumerate(running) if process.poll() not in (None, 0)]
    if failed:
        ends = (f"process {i} of {len(running)} ended with status {running[i].returncode}" for i in failed)
        raise ProcessError("\n".join(f"{end}\n{_tail(folder, i)}" for end, i in zip(ends, failed, strict=True)))


def _late(running: list[subprocess.Popen], folder: Path, timeout: float) -> str:
    late = [index for index, process in enumerate(running) if process.poll() is None]
    for index in late:
        running[index].send_signal(signal.SIGUSR1)  # the process writes where it is
    time.sleep(0.5)
    texts = (f"process {i} of {len(running)} has not ended in {timeout:g} s\n{_tail(folder, i)}" for i in late)
    return "\n".join(texts)


def _tail(folder: Path, index: int) -> str:
    return "\n".join(f"  {line}" for line in _output(folder, index).splitlines()[-LINES:])


def _output(folder: Path, index: int) -> str:
    return (folder / f"{index}.log").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(index: int, count: int, devices: int, folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    # A shell starts what runs in its background with SIGINT ignored, and Python then has no handler of its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job, args, port = pickle.loads((folder / "job").read_bytes())
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=index)
    try:
        # Only now: what a module makes when it is imported must not start JAX before.
        function = _script(job) if isinstance(job, Path) else getattr(importlib.import_module(job[0]), job[1])
        (folder / f"{index}.ready").touch()
        result = function(*args)
    except BaseException:
        # At once: an orderly end waits for the other processes, which wait for this one.
        traceback.print_exc()
        os._exit(1)
    (folder / f"{index}.result").write_bytes(pickle.dumps(result))
    jax.distributed.shutdown()


def _script(path: Path) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        sys.argv = [str(path), *map(str, args)]
        return runpy.run_path(str(path), run_name="__main__").get("result")

    return run


if __name__ == "__main__":
    _work(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
