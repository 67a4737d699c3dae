"""Checkpoints of training states."""

from jax_te.checkpoint.checkpointer import TrainCheckpointer
from jax_te.checkpoint.read import describe_checkpoint
from jax_te.checkpoint.run_steps import DamagedCheckpointWarning
from jax_te.checkpoint.steps import CHECKPOINT_FOLDER, METADATA_FILE, checkpoint_steps, holds_checkpoints

# For users. The other names above are for the other packages of jax_te.
__all__ = ["DamagedCheckpointWarning", "TrainCheckpointer"]
