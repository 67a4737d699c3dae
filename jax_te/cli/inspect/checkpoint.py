"""``jax-te inspect checkpoint``: the arrays and metadata of a checkpoint of any kind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_te._text import table
from jax_te._validation import brief
from jax_te.checkpoint import describe_checkpoint
from jax_te.cli.checkpoint_kind import checkpoint_folder, kind_of
from jax_te.cli.inspect.options import OF_STEPS, InspectCheckpoint
from jax_te.cli.option_table import check_effects
from jax_te.cli.run_files import CONFIG_FILE, read_config
from jax_te.interop.huggingface import open_adapters, open_tensors
from jax_te.interop.megatron import read_megatron
from jax_te.interop.torch import METADATA, StoredTensor, open_torch_file, read_torch_distributed

_DEPTH = 20
"""Depth of nested containers that are shown."""

_PEFT_FIELDS = {
    "method": "peft_type",
    "rank": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "base_model": "base_model_name_or_path",
}
"""Names of facts that are shown of adapters -> fields of ``adapter_config.json``."""


class _Row(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def run(options: InspectCheckpoint) -> int:
    """Return the exit status, 0, once names, shapes, dtypes, shardings and sizes of a checkpoint are printed.

    Raises:
        ValueError: if CHECKPOINT is not a checkpoint, is of two kinds, or has none of ``--step``.
    """
    path = Path(options.checkpoint)
    kind = kind_of(path)
    check_effects(options, {OF_STEPS: kind in _OF_STEPS})
    facts, rows = _OF_STEPS[kind](path, options.step) if kind in _OF_STEPS else _OTHERS[kind](path)
    facts = {"kind": kind, "step": None, "recipe": None} | facts
    facts |= {"arrays": len(rows), "bytes": sum(row.bytes for row in rows)}
    if options.json:
        arrays = [row._asdict() | {"bytes": row.bytes} for row in rows]
        print(json.dumps(facts | {"arrays": arrays}, indent=2))
        return 0
    print("  ".join(f"{name} {_shown(value)}" for name, value in facts.items()), end="\n\n")
    lines = [(row.name, row.dtype, str(list(row.shape)), row.sharding, f"{row.bytes:,}") for row in rows]
    print(table(("name", "dtype", "shape", "sharding as saved", "bytes"), lines, right=1))
    return 0


def _ours(path: Path, step: int | None) -> tuple[dict[str, Any], list[_Row]]:
    folder = checkpoint_folder(path, step)
    saved, arrays = describe_checkpoint(folder)
    output = next((parent for parent in (folder, *folder.parents[:2]) if (parent / CONFIG_FILE).is_file()), None)
    config = None if output is None else read_config(output)
    recipe = "unknown" if config is None else config.recipe
    return {"step": saved, "recipe": recipe}, [_Row(name, *array) for name, array in arrays.items()]


def _huggingface(path: Path) -> tuple[dict[str, Any], list[_Row]]:
    tensors, _ = open_tensors(path)
    return {}, [_row(*item) for item in tensors.items()]


def _peft(path: Path) -> tuple[dict[str, Any], list[_Row]]:
    fields, tensors = open_adapters(path)
    facts = {ours: fields.get(theirs) for ours, theirs in _PEFT_FIELDS.items()}
    # Those of single layers, where they differ from `rank` and `alpha`.
    facts |= {name: fields[name] for name in ("rank_pattern", "alpha_pattern") if fields.get(name)}
    parameters = sum(tensor.size for tensor in tensors.values())
    return facts | {"parameters": parameters}, [_row(*item) for item in tensors.items()]


def _megatron(path: Path, step: int | None) -> tuple[dict[str, Any], list[_Row]]:
    # Without Megatron-LM's common.pt it may be of any program, whose names are shown as they are.
    if step is None and (path / METADATA).is_file() and not (path / "common.pt").is_file():
        return {}, [_row(*item) for item in read_torch_distributed(path).tensors.items()]
    checkpoint = read_megatron(path, iteration=step)
    recipe = checkpoint.args.get("fp8_recipe") if checkpoint.args.get("fp8") else None
    return {"step": checkpoint.iteration, "recipe": recipe}, [_row(*item) for item in checkpoint.tensors.items()]


def _torch(path: Path) -> tuple[dict[str, Any], list[_Row]]:
    state = open_torch_file(path)
    step = state.get("iteration") if isinstance(state, dict) else None
    return {"step": step if type(step) is int else None}, [_row(*item) for item in _arrays(state, "", set())]


_OF_STEPS = {"jax-te": _ours, "megatron": _megatron}
"""Functions of the kinds of which a folder may hold several checkpoints: of its path and a step, None the newest."""
_OTHERS = {"huggingface": _huggingface, "peft": _peft, "torch": _torch}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return brief(value) if isinstance(value, list) else str(value)


def _arrays(value: Any, name: str, shown: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "shape"):
        yield name or "(the file)", value
    # A container that occurs many times, or inside of itself, is shown once.
    elif isinstance(value, Mapping | list | tuple) and id(value) not in shown and depth < _DEPTH:
        shown.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _arrays(item, f"{name}.{key}".strip("."), shown, depth + 1)


def _row(name: str, tensor: Any) -> _Row:
    # Files contain no mesh, only the number of pieces of each tensor.
    pieces = len(tensor.pieces) if isinstance(tensor, StoredTensor) else 1
    return _Row(name, tensor.dtype.name, tuple(tensor.shape), "whole" if pieces == 1 else f"{pieces} pieces")
