"""Index and count of a run's processes, from the command line or the launcher. Imports no jax."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LAUNCHERS = (
    # For each launcher: a variable that its processes have, the process count and this process's index, as in JAX.
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("JOB_COMPLETION_INDEX", None, "JOB_COMPLETION_INDEX"),
)


class Launch(NamedTuple):
    """Coordinator, index and count of a run's processes.

    Args:
        index: index of this process, from 0.
        count: number of processes; None: JAX finds it.
        coordinator: ``host:port`` of process 0; None: JAX finds it.
    """

    index: int
    count: int | None = None
    coordinator: str | None = None


class Bounds(NamedTuple):
    """Seconds that a process waits for others of its run, counted from their last heartbeat.

    Args:
        start: timeout until another process has joined.
        save: timeout until another file has grown, while a checkpoint is written.
        step: timeout until a process has made progress, at any other time.
    """

    start: float = 300.0
    save: float = 60.0
    step: float = 600.0


def is_launched(processes: str = "auto") -> bool:
    """Return whether ``--processes`` or a launcher's variables give a place among processes, of which it may be one.

    A script is the same for any number of processes.
    """
    if processes == "auto":
        return not os.environ.keys().isdisjoint((*PLACE, *(sign for sign, *_ in _LAUNCHERS)))
    return processes != "none"


def find_launch(processes: str = "auto") -> Launch | None:
    """Return this process's launch from ``--processes`` or the environment, None for a run of one process.

    In ``auto`` the variables of `PLACE` count first, then what SLURM, Open MPI or an indexed Job of
    Kubernetes set.

    Raises:
        ValueError: for variables that are missing or not numbers, and an index that is not below the count.
    """
    environ = os.environ
    if processes == "none":
        return None
    if processes == "auto" and not environ.keys() & set(PLACE[1:]):
        for sign, count, index in _LAUNCHERS:
            if sign in environ and (count is None or environ.get(count) != "1"):
                return Launch(int(environ.get(index, "0")))
        return None
    text = ",".join(environ.get(name, "") for name in PLACE) if processes == "auto" else processes
    match = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", text)
    if match is None or int(match[3]) >= int(match[2]):
        raise ValueError(
            f"HOST:PORT of process 0, number of processes and number of this one, from 0, are {text!r}; give all of "
            f"{', '.join(PLACE)}, or --processes HOST:PORT,COUNT,NUMBER"
        )
    return Launch(int(match[3]), int(match[2]), match[1]) if match[2] != "1" else None
