"""The files of a training run: ``config.json`` and the checkpoint folder, and whether a run can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import zlib
from collections.abc import Mapping, Sequence
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

_LABELS = {"tokenizer_sha256": "file of --tokenizer", "vocab_size": "vocabulary"}
_LABELS |= {"end_of_text": "end of text of --tokenizer"}
"""Names for messages of the fields that are not options."""

KEPT = {"preset", *options_of(Recorded), *(name for name, row in OPTIONS.items() if row.kept)}
"""Fields of ``config.json``."""


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
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in KEPT}
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
        unknown = sorted(values.keys() - KEPT)
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


def label(name: str) -> str:
    """Return what a field of a run's configuration is called in a message: its option, where it has one.

    >>> label("hidden_size"), label("tokenizer_sha256")
    ('--hidden-size', 'file of --tokenizer')
    """
    return _LABELS.get(name) or flag(name)


def differing_fields(saved: RunConfig, values: Mapping[str, Any]) -> list[str]:
    """Return the fields of ``config.json`` that have other ``values`` than those of the saved run."""
    return [name for name, value in values.items() if name in KEPT and getattr(saved, name) != value]


def changed_fields(saved: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Return the fields whose ``given`` values prevent resuming the run."""
    return [name for name in differing_fields(saved, given) if name not in MAY_CHANGE]


def listed_changes(
    saved: RunConfig, values: Mapping[str, Any], names: Sequence[str], form: str = "{name} was {was}, is {now}"
) -> str:
    """Return a list, for a message, of fields with their saved values and others."""
    # Of another tokenizer, its file is named beside its checksum.
    shown = [name for name in names if name != "tokenizer" or "tokenizer_sha256" not in names]
    return "; ".join(
        form.format(name=label(name), was=_shown(name, vars(saved)), now=_shown(name, values)) for name in shown
    )


def check_resumable(saved: RunConfig, given: Mapping[str, Any], directory: Path) -> None:
    """Raise ValueError, naming every field, if values ``given`` now keep ``directory``'s run from being resumed."""
    changed = changed_fields(saved, given)
    if changed:
        listed = listed_changes(saved, given, changed, "{name} is {was} there, {now} here")
        raise ValueError(
            f"{directory} holds a run of another configuration: {listed}. Give another --output, or leave these "
            "options out to resume it"
        )


def _shown(name: str, values: Mapping[str, Any]) -> str:
    """Return a field's value for a message; for a file's text, its size and checksum."""
    value = values[name]
    if name == "tokenizer_sha256":
        return "none, for bytes" if value is None else f"{values['tokenizer']} (SHA-256 {value[:8]}...)"
    if name not in ("precision_config", "model_config") or value is None:
        return str(value)
    return f"a file of {len(value)} characters (CRC {zlib.crc32(value.encode()):08x})"
