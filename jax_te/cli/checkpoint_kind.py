"""Detection of a checkpoint's kind from its path."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jax_te.checkpoint import METADATA_FILE, checkpoint_steps
from jax_te.cli.run_files import CHECKPOINT_FOLDER
from jax_te.interop.huggingface import INDEX, SINGLE
from jax_te.interop.megatron import TRACKER
from jax_te.interop.torch import METADATA

Kind = Literal["jax-te", "huggingface", "megatron", "torch"]


def kind_of(path: Path) -> Kind:
    """Return the kind of a checkpoint: ``"megatron"`` is also a folder of torch.distributed, ``"torch"`` a file.

    Raises:
        ValueError: for a path without a checkpoint.
    """
    if path.is_file() and path.suffix in (".pt", ".pth", ".bin"):
        return "torch"
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    # A run has a config.json, too, so the kinds are distinguished by their tensor files.
    if names & {METADATA, TRACKER, "model_optim_rng.pt"} or any(name.startswith("mp_rank_") for name in names):
        return "megatron"
    if names & {SINGLE, INDEX}:
        return "huggingface"
    if names & {CHECKPOINT_FOLDER, METADATA_FILE} or checkpoint_steps(path):
        return "jax-te"
    raise ValueError(
        f"{path} is not a checkpoint: a run of jax-te train, its checkpoints or one of them; a folder of Hugging Face "
        f"with {SINGLE} or {INDEX}; a folder of Megatron-LM or torch.distributed; a file *.pt of torch.save"
    )


def checkpoint_folder(path: Path) -> Path:
    """Return the folder of one jax-te checkpoint: the newest of a run, or the path itself.

    Raises:
        ValueError: if there is none yet.
    """
    if (path / METADATA_FILE).exists():
        return path
    folder = path / CHECKPOINT_FOLDER if (path / CHECKPOINT_FOLDER).is_dir() else path
    steps = checkpoint_steps(folder)
    if not steps:
        raise ValueError(f"{path} has saved no checkpoint yet")
    return folder / str(max(steps))
