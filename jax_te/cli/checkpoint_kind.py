"""Detection of a checkpoint's kind from its path."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jax_te._validation import brief
from jax_te.checkpoint import CHECKPOINT_FOLDER, METADATA_FILE, checkpoint_steps
from jax_te.interop.huggingface import ADAPTER_TENSORS, INDEX, SINGLE
from jax_te.interop.megatron import RANK_FILE, TRACKER
from jax_te.interop.torch import METADATA

Kind = Literal["jax-te", "huggingface", "peft", "megatron", "torch"]


_NAMES: dict[Kind, str] = {
    "jax-te": "checkpoints of jax-te",
    "huggingface": "a model of Hugging Face",
    "peft": "adapters of PEFT",
    "megatron": "a checkpoint of Megatron-LM or torch.distributed",
}


def kind_of(path: Path) -> Kind:
    """Return the kind of a checkpoint: ``"megatron"`` is also a folder of torch.distributed, ``"torch"`` a file.

    Raises:
        ValueError: for a path without a checkpoint, and for a folder with checkpoints of several kinds.
    """
    if path.is_file() and path.suffix in (".pt", ".pth", ".bin"):
        return "torch"
    found = _kinds_in(path) if path.is_dir() else {}
    if len(found) > 1:
        raise ValueError(
            f"{path} holds {_listed(found)}, and it is not known which one is meant; move one to another folder"
        )
    for kind in found:
        return kind
    if (path / CHECKPOINT_FOLDER).is_dir():
        return "jax-te"  # of a run that has saved nothing yet
    raise ValueError(
        f"{path} is not a checkpoint: a run of jax-te train, its checkpoints or one of them; a folder of Hugging Face "
        f"with {SINGLE} or {INDEX}, or of PEFT with {ADAPTER_TENSORS}; a folder of Megatron-LM or torch.distributed; a "
        "file *.pt of torch.save"
    )


def refuse_models(output: Path) -> None:
    """Raise ValueError for a folder that holds a model already, in which a run's would be a second one."""
    if found := _kinds_in(output) if output.is_dir() else {}:
        raise ValueError(
            f"{output} holds {_listed(found)}, and commands that are given this folder could not tell which model is "
            "meant once a run is in it, too; give another --output"
        )


def _listed(found: dict[Kind, str]) -> str:
    return " and ".join(f"{_NAMES[kind]} ({file})" for kind, file in found.items())


def _kinds_in(folder: Path) -> dict[Kind, str]:
    """Return the kinds of the checkpoints in a folder, and of each a name by which it is known."""
    names = sorted(entry.name for entry in folder.iterdir())
    own = [CHECKPOINT_FOLDER] if checkpoint_steps(folder / CHECKPOINT_FOLDER) else checkpoint_steps(folder)[-1:]
    # A run has a config.json, too, so the kinds are distinguished by their tensor files.
    of_kind: dict[Kind, list[str]] = {
        "jax-te": [METADATA_FILE] if METADATA_FILE in names else [str(name) for name in own],
        "huggingface": [name for name in names if name in (SINGLE, INDEX)],
        "peft": [name for name in names if name == ADAPTER_TENSORS],
        "megatron": [name for name in names if name in (METADATA, TRACKER, RANK_FILE) or name.startswith("mp_rank_")],
    }
    return {kind: files[0] for kind, files in of_kind.items() if files}


def checkpoint_folder(path: Path, step: int | None = None) -> Path:
    """Return the folder of one jax-te checkpoint: of a run the newest, or that of a step; or the path itself.

    Raises:
        ValueError: if there is none yet, or none of this step; for a step of a path that is one checkpoint.
    """
    if (path / METADATA_FILE).exists():
        if step is not None:
            raise ValueError(
                f"{path} is one checkpoint, that of step {path.name}, and --step {step} chooses among those of a run; "
                "leave --step out, or give the run's folder"
            )
        return path
    folder = path / CHECKPOINT_FOLDER if (path / CHECKPOINT_FOLDER).is_dir() else path
    steps = checkpoint_steps(folder)
    if not steps:
        raise ValueError(f"{path} has saved no checkpoint yet")
    if step is not None and step not in steps:
        raise ValueError(f"{path} has no checkpoint of --step {step}; it has {brief(steps)[1:-1]}")
    return folder / str(steps[-1] if step is None else step)
