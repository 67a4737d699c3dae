"""Runs of ``jax-te train`` by several processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time

import numpy as np

from tests.support.runs import MICRO, command, records

SLOW_STEP = """
import sys, time
from jax_te.cli import build, main

class SlowTrainer(build.Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        step = self.step

        def first(*args):
            self.step = step
            deadline = time.monotonic() + {seconds}
            while time.monotonic() < deadline:
                sum(range(10_000))
            return step(*args)

        done = []
        self.step = lambda *args: step(*args) if done else (done.append(1), first(*args))[1]

from jax_te.cli import train
train.Trainer = SlowTrainer
sys.exit(main.main())
"""
"""A program like ``jax-te`` whose first step takes long before it starts."""

KILLED_AT_START = """
import os, signal, sys
import jax
from jax_te.cli import main

connect = jax.distributed.initialize

def initialize(*args, **options):
    connect(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

jax.distributed.initialize = initialize
sys.exit(main.main())
"""
"""A program like ``jax-te`` that is killed as soon as JAX has connected it: before it tells others its devices."""

FILES_HANG = """
import os, sys, threading
from jax_te.cli import main

answer = os.open

def hang(path, *args, **options):
    if ".processes" in str(path) and os.path.exists({sign!r}):
        threading.Event().wait()
    return answer(path, *args, **options)

os.open = hang
sys.exit(main.main())
"""
"""A program like ``jax-te`` whose file system does not answer for heartbeats any more once there is a file."""


@contextlib.contextmanager
def started(count, output, *argv, devices=1, others=None, only=None, programs=None, cwd=None):
    """Yield the running processes of one ``jax-te train``; none is left afterwards.

    Args:
        count, output, argv: number of processes, folder and options.
        devices: of each process.
        others: more options of single processes, by number.
        only: numbers of those that are started. None: all.
        cwd: working directories, by number.
        programs: Python programs, by number, in place of ``jax-te``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(count) if only is None else only:
            place = f"{address},{count},{index}" if count > 1 else "none"
            line, options = command(
                "train", "--output", output, *MICRO, *argv, *(others or {}).get(index, ()), "--processes", place
            )
            options["cwd"] = (cwd or {}).get(index)
            if index in (programs or {}):
                line = [line[0], "-c", programs[index], *line[3:]]
            options["env"] |= {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
            process = stack.enter_context(subprocess.Popen(line, **options))
            stack.callback(process.kill)
            running.append(process)
        yield running


def ended(running):
    """Return status, stdout and stderr of each process."""
    said = [process.communicate(timeout=240) for process in running]
    return [(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]


def when_recorded(steps, output, running):
    """Wait until so many steps are in the metrics file."""
    deadline = time.monotonic() + 240
    while not (output / "metrics.jsonl").exists() or (output / "metrics.jsonl").read_bytes().count(b'"loss"') < steps:
        assert all(process.poll() is None for process in running), ended(running)
        assert time.monotonic() < deadline
        time.sleep(0.002)


def train(count, output, *argv, devices=1):
    """Return what the processes of a run that succeeded said."""
    with started(count, output, *argv, devices=devices) as running:
        found = ended(running)
    assert [status for status, _, _ in found] == [0] * count, found
    return found


def assert_same_losses(output, reference, last=None):
    """Losses are means over the same batches; only the order of fp32 additions may differ."""
    found, expected = records(output), records(reference)
    found = [record for record in found if last is None or record["step"] < last]
    expected = [record for record in expected if last is None or record["step"] < last]
    assert [sorted(record) for record in found] == [sorted(record) for record in expected]
    for name in ("loss", "heldout_loss", "grad_norm"):
        values = [[record[name] for record in each if name in record] for each in (found, expected)]
        np.testing.assert_allclose(*values, rtol=2.0**-16)
