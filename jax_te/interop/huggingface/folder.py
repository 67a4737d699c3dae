"""Hugging Face folders: ``config.json``, and the tensors in one file or in several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._whole_files import NewFiles
from jax_te.interop.huggingface.safetensors import (
    MAX_JSON,
    TensorFile,
    TensorPlan,
    nbytes,
    read_json,
    shards,
    write_file,
)

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_DEPTHS = "num_nextn_predict_layers"
_HEADS_BY_TENSORS, _HEAD = ("t5", "mt5"), "lm_head.weight"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_OTHER_WEIGHTS = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?|tf_model\.h5|flax_model\.msgpack")
"""Files of tensors that transformers loads, too, and that no save here replaces."""
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors")
"""Names, not paths: files that an index names are read, and must be in its folder."""
_WHERE_FROM = (
    "give a folder that transformers wrote with save_pretrained, or one of the hub that `hf download NAME --local-dir "
    "FOLDER` wrote; nothing is downloaded here"
)


def json_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: if there is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there; {_WHERE_FROM}")
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON} are read")
    return read_json(path.read_bytes(), path)


def check_no_model(folder: Path) -> None:
    """Raise ValueError for a folder with a model, beside which transformers would take an adapter for a part of it."""
    found = [name for name in (CONFIG, SINGLE, INDEX) if (folder / name).exists()]
    if found:
        raise ValueError(
            f"{folder} holds a model ({', '.join(found)}), and transformers would load an adapter there together with "
            "it; give a folder of its own to the adapter"
        )


def check_no_adapter(folder: Path) -> None:
    """Raise ValueError for a folder with an adapter, which transformers would add to a model there."""
    if found := _adapter_files(folder):
        raise ValueError(
            f"{folder} holds an adapter ({found}), and transformers would add it to a model there; give a folder of "
            "its own to the model"
        )


def _adapter_files(folder: Path) -> str:
    return ", ".join(name for name in (ADAPTER_CONFIG, ADAPTER_TENSORS) if (folder / name).exists())


def check_config(folder: Path) -> None:
    """Raise ValueError for a folder whose ``config.json`` is not a model's, such as that of a run or a project."""
    _check_replaceable(folder / CONFIG, ("model_type", "architectures"))


def check_adapter_config(folder: Path) -> None:
    """Raise ValueError for a folder whose ``adapter_config.json`` is not PEFT's; other libraries have such a file."""
    _check_replaceable(folder / ADAPTER_CONFIG, ("peft_type",))


def _check_replaceable(path: Path, fields: tuple[str, ...]) -> None:
    """Raise ValueError if a file is there that has none of the fields, and so is of something else."""
    if not path.is_file():
        return
    try:
        values = json_file(path)
    except ValueError:
        values = {}
    if not any(name in values for name in fields):
        raise ValueError(
            f"{path} has no {' and no '.join(fields)}, so it belongs to something else, and would be replaced; give "
            "another folder"
        )


def check_no_other_weights(folder: Path) -> None:
    """Raise ValueError for a folder with tensors of an older model that would stay beside those of a new one."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = [name for name in names if _OTHER_WEIGHTS.fullmatch(name)]
    if found:
        raise ValueError(
            f"{folder} holds tensors of another model in files that are not replaced ({', '.join(found[:8])}); remove "
            "them, or give another folder"
        )


def config_values(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's ``config.json``, without layers that the folder lacks, and with the head it has.

    Raises:
        ValueError: for files that cannot be read.
    """
    values = json_file(folder / CONFIG)
    # Only fields that depend on the tensors have their files opened.
    if values.get("model_type") in _HEADS_BY_TENSORS:
        return with_told_head(values, open_tensors(folder)[0])
    return without_lost_layers(values, open_tensors(folder)[0]) if values.get(_DEPTHS) else values


def with_told_head(values: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields of the ``config.json`` of a T5 or mT5 that say whether the tensors have a head of their own.

    transformers decides by the tensors, whatever ``tie_word_embeddings`` is.

    >>> with_told_head({"model_type": "mt5", "tie_word_embeddings": False}, ["shared.weight"])
    {'model_type': 'mt5', 'tie_word_embeddings': True}
    """
    scales = values.get("model_type") == "t5"
    said = values.get("tie_word_embeddings")
    shared = True if said is None else said
    scaled = values.get("scale_decoder_outputs")
    scaled = shared if scaled is None else scaled
    tied = _HEAD not in tensors or bool(scales and shared and scaled)
    if tied == shared:
        return values
    # The first field would else decide on the second as well.
    return values | {"tie_word_embeddings": tied} | ({"scale_decoder_outputs": scaled} if scales else {})


def without_lost_layers(values: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields of a ``config.json`` without layers of multi-token prediction of which there are no tensors.

    transformers saves a model without these layers, whose number it keeps.

    >>> without_lost_layers({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, ["model.layers.1.mlp.gate.weight"])
    {'num_hidden_layers': 2, 'num_nextn_predict_layers': 0}
    """
    first = f"model.layers.{values.get('num_hidden_layers')}."
    lost = values.get(_DEPTHS) and not any(name.startswith(first) for name in tensors)
    return values | {_DEPTHS: 0} if lost else values


def open_adapters(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the fields of a folder's ``adapter_config.json``, and its tensors by name, over a memory map.

    Raises:
        ValueError: for a missing or damaged file.
    """
    return json_file(folder / ADAPTER_CONFIG), TensorFile(folder / ADAPTER_TENSORS).tensors


def open_tensors(folder: Path) -> tuple[dict[str, np.ndarray], list[TensorFile]]:
    """Return the tensors of a folder by name, over memory maps, and their files.

    Raises:
        ValueError: if there are none; for a damaged file; for an index that names files outside of the folder, or does
            not fit the files; for a folder that holds an adapter, too.
    """
    if found := _adapter_files(folder):
        raise ValueError(
            f"{folder} holds a model and an adapter ({found}), which transformers would add to it; move the adapter to "
            "a folder of its own, and load it with load_peft if the model is to have it"
        )
    single = folder / SINGLE
    if single.exists():
        file = TensorFile(single)
        return file.tensors, [file]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; {_WHERE_FROM}")
    index: Any = json_file(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    for name in index.values():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise ValueError(f"{folder / INDEX} names {str(name)[:200]!r}, which is not a name of a .safetensors file")
    files = {name: TensorFile(folder / name) for name in sorted(set(index.values()))}
    tensors: dict[str, np.ndarray] = {}
    owners: dict[str, Any] = {}
    for name, file in files.items():
        tensors |= file.tensors
        owners |= dict.fromkeys(file.tensors, name)
    count = sum(len(file.tensors) for file in files.values())
    if owners != index or count != len(owners):
        wrong = sorted(name for name in owners.keys() | index.keys() if owners.get(name) != index.get(name))
        raise ValueError(
            f"{folder / INDEX} is not the index of its files: {', '.join(wrong[:8])[:500] or 'duplicates'}"
        )
    return tensors, list(files.values())


def write_folder(
    new: NewFiles,
    config: Mapping[str, Any],
    plan: list[TensorPlan],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_size: int,
) -> None:
    """Write ``config.json``, and tensors to one file or to several with an index, in place of an older model there.

    Args:
        new: new files of the folder.
        config: contents of ``config.json``.
        plan: plan of all tensors.
        tensors: the same, in the same order; each is read when the previous one is written.
        max_shard_size: maximum size of a file, in bytes.
    """
    parts = list(shards(plan, max_shard_size))
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else [SINGLE]
    stream = iter(tensors)
    for name, part in zip(names, parts, strict=True):
        write_file(new.part(name), part, _take(stream, len(part)))
    # Reading on also lets the last parameter report its progress.
    surplus = next(stream, None)
    if surplus is not None:
        raise ValueError(f"tensor {surplus[0]} is in no file: it comes after the last of the plan")
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(nbytes(dtype, shape) for _, dtype, shape in plan)},
            "weight_map": {tensor: name for name, part in zip(names, parts, strict=True) for tensor, *_ in part},
        }
        new.part(INDEX).write_text(json.dumps(index, indent=2))
    # The last: it makes the folder a model.
    new.part(CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    new.replaces(_model_files(new.folder))


def _model_files(folder: Path) -> list[Path]:
    """Return the files of the model in a folder, to be removed in this order.

    ``config.json`` goes first and comes last: a call that is interrupted meanwhile leaves the old model, the new one,
    or a folder that nothing loads, but never tensors under the configuration of others.
    """
    # Also those that no new file replaces: a reader takes the single file before an index.
    ours = {path.name for path in folder.iterdir() if _OURS.fullmatch(path.name)}
    return [folder / CONFIG, *(folder / name for name in sorted(ours | _shards_of_index(folder)))]


def _shards_of_index(folder: Path) -> set[str]:
    """Return the names of the files that a folder's index has, whatever they are; none if it is damaged."""
    try:
        named = json_file(folder / INDEX).get("weight_map")
    except ValueError:
        return set()
    names = named.values() if isinstance(named, dict) else ()
    return {name for name in names if isinstance(name, str) and _SHARD.fullmatch(name) and (folder / name).is_file()}


def _take(stream: Iterator[tuple[str, np.ndarray]], count: int) -> Iterator[tuple[str, np.ndarray]]:
    for _ in range(count):
        yield next(stream)
