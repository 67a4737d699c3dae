"""Checkpoints of training states."""

from jax_te.checkpoint.checkpointer import DamagedCheckpointWarning, TrainCheckpointer

__all__ = ["DamagedCheckpointWarning", "TrainCheckpointer"]
