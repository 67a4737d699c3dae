"""Meetings of two processes: who comes too late is told so, as is who has waited."""

from __future__ import annotations

import time

import jax
import pytest

from jax_te._processes import meet
from tests.support.processes import run_processes


def come_too_late():
    """Return what a process is told at the first meeting; at the second one they find each other."""
    meet(60.0)  # the start of the processes is left out
    if jax.process_index() == 1:
        time.sleep(1.5)
    with pytest.raises(TimeoutError) as told:
        meet(0.5)
    meet(60.0)
    return str(told.value)


@pytest.mark.costly
def test_a_process_that_comes_too_late_finds_nobody():
    for number, finished in enumerate(run_processes(2, come_too_late)):
        assert f"process {number} waited 0.5 s for the others" in finished.result
