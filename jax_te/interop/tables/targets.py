"""Folders that a model may be written into."""

from __future__ import annotations

from pathlib import Path

from jax_te.checkpoint import holds_checkpoints


def check_no_run(folder: Path) -> None:
    """Raise ValueError for a folder with checkpoints of jax_te: it would then hold two models, with one name."""
    if holds_checkpoints(folder):
        raise ValueError(
            f"{folder} holds checkpoints of a run of jax_te, and commands that are given this folder could not tell "
            "which model is meant; give another folder"
        )
