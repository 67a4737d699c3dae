"""What every measurement takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_te.typing import BackendName

GIB = 2**30
Row = dict[str, Any]
"""A row of results, as JSON can hold it."""

Shape = tuple[int, int, int, int, int]
"""Batch, sequence, hidden size, heads, feed-forward size."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How something is measured.

    Args:
        backend: of jax_te's side.
        rounds: times that every contestant has its turn; the median counts.
        calls: calls of a turn.
    """

    backend: BackendName = "auto"
    rounds: int = 7
    calls: int = 10
