"""Settings of measurements: numbers of rounds and calls, and the sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jax_te.config import TransformerConfig
from jax_te.typing import BackendName

GIB = 2**30
Row = dict[str, Any]
"""A row of results, JSON-serializable."""

Shape = tuple[int, int, int, int, int]
"""Batch, sequence, hidden size, heads, feed-forward size."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Args:
        backend: backend of jax_te's side.
        rounds: number of turns of every contestant, of which the median counts.
        calls: number of calls in a turn.
        profile: folder for traces, one for each contestant. None: nothing is traced.
    """

    backend: BackendName = "auto"
    rounds: int = 7
    calls: int = 10
    profile: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a GPT and of its batch.

    Args:
        config: configuration of the model's layers.
        vocabulary: rows of the embedding.
        batch, sequence: sizes of a step's tokens.
        microbatches: number of microbatches in a step.
        mesh: mesh that the step runs on, or None.
        distributed_optimizer: whether replicas split masters and optimizer state.
        tied: whether the embedding's rows are the head's, too.
        positions: position embedding, ``"rope"`` or ``"learned_absolute"``.
    """

    config: TransformerConfig
    vocabulary: int
    batch: int
    sequence: int
    microbatches: int = 1
    mesh: Mesh | None = None
    distributed_optimizer: bool = False
    tied: bool = True
    positions: str = "learned_absolute"
