"""What a process reads from files, as TensorStore counts it."""

from __future__ import annotations

import contextlib
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


def stored_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _count() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(COUNTER)
    return sum(value["value"] for metric in metrics for value in metric["values"])
