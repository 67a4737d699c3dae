"""Traces of what is measured, taken after its rounds: a trace slows the calls that it records."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from jax_te.metrics import KernelTimes, StepTrace

TRACED_CALLS = 2


def traced(name: str, run: Callable[[int], object], folder: Path) -> KernelTimes | None:
    """Trace two calls, print the times of their kernels to stderr, and return them; None in other processes.

    Args:
        name: name of the row, and of the trace's folder in ``folder``.
        run: function that makes so many calls, and returns when they are done.
        folder: folder of the traces.
    """
    trace = StepTrace(folder / re.sub(r"\W+", "_", name), 1, TRACED_CALLS)
    trace.before(1)
    try:
        run(TRACED_CALLS)
        times = trace.after(TRACED_CALLS)
    finally:
        trace.close()
    print(f"{name}\n{times}\n", file=sys.stderr, flush=True)
    return times
