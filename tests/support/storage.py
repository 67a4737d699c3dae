"""What a process reads from files, as TensorStore counts it, and how much memory it takes meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import tensorstore

COUNTER = "/tensorstore/kvstore/file/bytes_read"


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Yield a list that holds the number of bytes once the block has ended."""
    found: list[int] = []
    before = _count()
    yield found
    found.append(_count() - before)


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that holds, once the block has ended, by how many bytes resident memory had grown at most."""
    found: list[int] = []
    gc.collect()
    before, ended, samples = _resident(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.001):
            samples.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
    found.append(max(samples) - before)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stored_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _count() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(COUNTER)
    return sum(value["value"] for metric in metrics for value in metric["values"])
