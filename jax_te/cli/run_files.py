"""The files of a training run: ``config.json`` and the checkpoint folder, and whether a run can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_te._processes import HEARTBEAT_FOLDER
from jax_te._validation import brief, read_text
from jax_te.checkpoint import CHECKPOINT_FOLDER, checkpoint_steps
from jax_te.cli.option_table import flag, options_of
from jax_te.cli.options import MAY_CHANGE, OPTIONS, Recorded
from jax_te.cli.run_config import RunConfig
from jax_te.data import TOKENIZER_FILE
from jax_te.metrics import PARTIAL, metrics_files

CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"
PROFILE_FOLDER = "profile"
VERSION = 1
"""Format version of ``config.json``."""

_RECORDED = options_of(Recorded)
_KEPT = {"preset", *_RECORDED, *(name for name, row in OPTIONS.items() if row.kept)}


def convert_command(output: str | Path) -> str:
    """Return the command that writes the model of a run's folder in the format of Hugging Face.

    >>> convert_command("runs/tiny")
    'jax-te convert runs/tiny runs/tiny-hf'
    >>> convert_command("my runs/tiny")
    "jax-te convert 'my runs/tiny' 'my runs/tiny-hf'"
    """
    return f"jax-te convert {shlex.quote(str(output))} {shlex.quote(f'{output}-hf')}"


def write_config(config: RunConfig, directory: Path) -> None:
    """Write ``config.json`` atomically."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in _KEPT}
    text = json.dumps({"version": VERSION, "crc32": _crc32(values), **values}, indent=2) + "\n"
    partial = directory / (CONFIG_FILE + PARTIAL)
    partial.write_text(text, encoding="utf-8")
    # A rename is atomic: a run that is killed here leaves the old file or the new one.
    os.replace(partial, directory / CONFIG_FILE)


def written_files(directory: Path) -> list[Path]:
    """Return what a run writes in its folder, whether it exists or not, but for checkpoints and traces.

    Those have folders of their own, in which every save and every trace makes a new one.
    """
    own = (directory / name for name in (CONFIG_FILE, CONFIG_FILE + PARTIAL, LOCK_FILE, HEARTBEAT_FOLDER))
    tokenizer = directory / TOKENIZER_FILE
    return [*own, tokenizer, tokenizer.with_suffix(PARTIAL), *metrics_files(directory, directory / PROFILE_FOLDER)]


def refuse_links(directory: Path) -> None:
    """Raise ValueError if a file that a run writes is a symbolic link: a folder may be somebody else's.

    Folders may be links, to a larger disk.
    """
    for path in written_files(directory):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}, and a run would write there; remove the link, or "
                "give another --output"
            )


def holds_run(directory: Path) -> bool:
    """Return whether a run in ``directory`` has saved anything that could be resumed."""
    return bool(checkpoint_steps(directory / CHECKPOINT_FOLDER))


def read_config(directory: Path) -> RunConfig | None:
    """Return the configuration a run left in ``directory``, or None if there is none.

    Raises:
        ValueError: if the file there is not a run's configuration, is a newer version's, or was edited.
    """
    path = directory / CONFIG_FILE
    try:
        values = json.loads(read_text(path))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        version, crc32 = values.pop("version", 0), values.pop("crc32", None)  # version 0 had neither
        if version not in range(VERSION + 1):
            raise ValueError(f"its version is {brief(version)}, and this jax-te reads those up to {VERSION}")
        unknown = sorted(values.keys() - _KEPT)
        if unknown:
            raise ValueError(f"unknown fields {brief(unknown)[1:-1]}")
        config = RunConfig(**values)
        if version and crc32 != _crc32(values):
            raise ValueError("it was edited by hand, which would go unnoticed in the results; undo that")
        return config
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a jax-te run ({error}); give another --output") from None


def _crc32(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def changed_fields(saved: RunConfig, given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields whose ``given`` values prevent resuming the run: name -> (saved, given)."""
    pairs = {name: (getattr(saved, name), value) for name, value in given.items() if name not in MAY_CHANGE}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_resumable(saved: RunConfig, given: Mapping[str, Any], directory: Path) -> None:
    """Raise ValueError, naming every field, if values ``given`` now keep ``directory``'s run from being resumed."""
    changed = changed_fields(saved, given)
    if changed:
        listed = "; ".join(
            f"{name if name in _RECORDED else flag(name)} is {_shown(name, was)} there, {_shown(name, now)} here"
            for name, (was, now) in changed.items()
        )
        raise ValueError(
            f"{directory} holds a run of another configuration: {listed}. Give another --output, or leave these "
            "options out to resume it"
        )


def _shown(name: str, value: Any) -> str:
    """Return a value for a message; for a file's text, its size and checksum."""
    if name not in ("precision_config", "model_config") or value is None:
        return str(value)
    return f"a file of {len(value)} characters (CRC {zlib.crc32(value.encode()):08x})"
