"""Saving of models as Hugging Face folders."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_te._processes import Meetings
from jax_te._validation import check_positive, checked, float_dtype
from jax_te._whole_files import whole_or_nothing
from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES, named_classes
from jax_te.interop.huggingface.block_scaled import Choice, held_kernels, quantization_config, written_scales
from jax_te.interop.huggingface.config_json import INITIAL_DEVIATION, NO_NUMBERS
from jax_te.interop.huggingface.folder import (
    CONFIG,
    check_config,
    check_no_adapter,
    check_no_other_weights,
    json_file,
    write_folder,
)
from jax_te.interop.huggingface.safetensors import TensorPlan
from jax_te.interop.tables import (
    Architecture,
    Entry,
    Form,
    KnownModel,
    OnProgress,
    Sizes,
    architecture_of,
    check_no_run,
    converted,
    is_state,
    on_host,
    placed_arrays,
    write_by_the_first,
)
from jax_te.models import T5Model
from jax_te.quantize import QuantizedKernel
from jax_te.typing import DTypeLike

_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model*", "tiktoken.model"),
    *("tekken.json", "tokenization_*.py", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Patterns of the names of a tokenizer's files, its code among them, and of those of generation."""


@checked
def save_huggingface(
    model: KnownModel,
    folder: str | Path,
    *,
    architecture: str | None = None,
    dtype: DTypeLike | None = None,
    block_scaled: Choice | None = None,
    max_shard_size: int = 5_000_000_000,
    like: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Write a model so that transformers loads it: ``config.json`` and safetensors.

    The files are written tensor by tensor under other names, and replace older ones when all are complete; a call that
    raises before leaves none of them, and an interrupted one never tensors under the ``config.json`` of others. With
    several processes all must call this, and the first one writes, one parameter after the other, whose shards it
    fetches one by one; if one process fails, all raise, and none waits longer than ten minutes for a parameter.
    Quantizer states are not part of such a folder. Values that are not finite are written as they are.

    Args:
        model: a model of `jax_te.models`.
        folder: folder to write; made if missing.
        architecture: name of the architecture, one of `ARCHITECTURES`. None: that of ``like`` if it can represent all
            options of the model, else the first that can.
        dtype: dtype of the tensors. None: the parameters'.
        block_scaled: ``"keep"``: kernels stored as `jax_te.recipe.Float8BlockScaling` stores them are written as they
            are, with fp32 scales for blocks of 128 x 128 and a ``quantization_config``: DeepSeek's form. ``dtype`` is
            that of the others.
        max_shard_size: the most bytes of tensors in a file; a larger one holds one tensor. Beyond one file there is
            an index.
        like: a folder from which the fields of ``config.json`` that say nothing of the model are taken, such as
            ``eos_token_id``, and the files of the tokenizer and of generation, in place of all that an older model in
            ``folder`` has; the one that the model was loaded from. ``folder`` itself: they stay.
        on_progress: function called after each parameter with the number of parameters done and the number of all.

    Raises:
        ValueError: for a model that no architecture, or not this one, can represent; the message names the options. For
            parameters that adapters added; that are stored quantized, without ``block_scaled`` or in another form. For
            a folder that holds a run's checkpoints, a ``config.json`` that is not a model's, an adapter, tensors in
            files of other names than those written here, or an older model's files of tokenizer and generation without
            a ``like`` that says which ones this model has; for finite values beyond the largest of ``dtype``.
        OSError: if the first process cannot write; if it cannot give the complete files their names: the message says
            what to do; if another process fails, or is waited for in vain (TimeoutError).

    Source: ``save_pretrained`` of transformers.

    >>> save_huggingface(model, "tuned", like="Llama-3.2-1B")  # doctest: +SKIP
    """
    folder = Path(folder)

    def write(stream: Iterator[tuple[str, np.ndarray]]) -> None:
        check_no_run(folder)
        check_config(folder)
        check_no_adapter(folder)
        check_no_other_weights(folder)
        source = None if like is None else Path(like)
        given, stale = _companions_of_save(folder, source)
        with whole_or_nothing(folder) as new:
            for path in given:  # before the tensors, which may take minutes
                shutil.copyfile(path, new.part(path.name))
            write_folder(new, config, contents.plan(), stream, max_shard_size)
            new.replaces(stale)

    # All checks are made inside: a call that one process refuses counts for all, whose next calls meet again.
    with Meetings("save_huggingface") as meetings:
        check_positive(max_shard_size=max_shard_size)
        dtype = None if dtype is None else float_dtype("dtype", dtype)
        if block_scaled not in (None, "keep"):
            raise ValueError(f"block_scaled must be 'keep' or None, got {block_scaled!r}")
        name, form = architecture_of(model, known_architectures(architecture, like))
        contents = _contents(model, name, form, dtype, {} if block_scaled is None else held_kernels(model), meetings)
        config = _config(name, form, contents, None if like is None else Path(like))
        write_by_the_first(write, contents.tensors(on_progress, meetings), meetings)


def known_architectures(name: str | None, like: str | Path | None = None) -> dict[str, Architecture]:
    """Return the architecture of a name; all without one, that of the folder ``like`` in front.

    Raises:
        ValueError: for an unknown name.
    """
    if name is not None and name not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    if name is not None:
        return {name: ARCHITECTURES[name]}
    first = [] if like is None else named_classes(json_file(Path(like) / CONFIG))[:1]
    return {known: ARCHITECTURES[known] for known in ARCHITECTURES if known in first} | ARCHITECTURES


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """Tensors of a folder, known before its first file is written.

    Args:
        sizes: sizes of the model.
        entries: entries of the architecture's table by paths of parameters.
        arrays: parameters by the same paths, of those stored quantized the FP8 values.
        dtypes: dtypes that they are written in, by the same paths.
        scales: tensors of scales by name, by the paths of parameters that are stored quantized.
        copies: further names of a tensor, by its name.
    """

    sizes: Sizes
    entries: dict[str, Entry]
    arrays: dict[str, jax.Array]
    dtypes: dict[str, np.dtype[Any]]
    scales: dict[str, dict[str, np.ndarray]]
    copies: dict[str, list[str]]

    def named(self, tensor: str) -> list[str]:
        """Return all names of a tensor."""
        return [tensor, *self.copies.get(tensor, ())]

    def plan_of(self, path: str) -> list[TensorPlan]:
        """Return name, dtype and shape of each tensor of a parameter, without its scales."""
        shapes = self.entries[path].their_shapes(self.sizes)
        return [(name, self.dtypes[path], shape) for tensor, shape in shapes.items() for name in self.named(tensor)]

    def plain(self) -> list[TensorPlan]:
        """Return the plan of parameters that are not stored quantized, and no states."""
        paths = [path for path in self.entries if path not in self.scales and not is_state(path)]
        return [tensor for path in paths for tensor in self.plan_of(path)]

    def plan(self) -> list[TensorPlan]:
        """Return the plan of all tensors, in the order of `tensors`."""
        plan: list[TensorPlan] = []
        for path in self.entries:
            plan += self.plan_of(path)
            plan += [(name, array.dtype, array.shape) for name, array in self.scales.get(path, {}).items()]
        return plan

    def tensors(self, on_progress: OnProgress | None, meetings: Meetings) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor with its name in the first process, nothing in others; all must take all of them.

        Each parameter is fetched when its turn comes.
        """
        for done, path in enumerate(self.entries, 1):
            whole = on_host(self.arrays[path], meetings, everywhere=False)
            if whole is not None:
                for tensor, array in self.entries[path].write(whole, self.sizes):
                    cast = converted(array, self.dtypes[path], tensor)
                    yield from ((name, cast) for name in self.named(tensor))
                yield from self.scales.get(path, {}).items()
            if on_progress is not None:
                on_progress(done, len(self.entries))


def _contents(
    model: Any,
    name: str,
    form: Form,
    dtype: np.dtype[Any] | None,
    held: Mapping[str, QuantizedKernel],
    meetings: Meetings,
) -> _Contents:
    """Return the tensors of a model's folder; unsupported parameters are refused before a file is written."""
    sizes = form.sizes()
    entries, arrays = placed_arrays(model, name, ARCHITECTURES[name].table(form), sizes, held)
    own = {path: np.dtype(array.dtype) for path, array in arrays.items()}
    # Sinks, which are fp32 here in a model of any dtype.
    own |= {path: np.dtype(form.config.params_dtype) for path in own if path.endswith("/softmax_offset")}
    kept = {path for path in own if dtype is None or path in held or is_state(path)}
    copies: dict[str, list[str]] = {}
    for copy, original in ARCHITECTURES[name].copies(form).items():
        copies.setdefault(original, []).append(copy)
    return _Contents(
        sizes=sizes,
        entries=entries,
        arrays=arrays,
        dtypes={path: stored if path in kept else np.dtype(dtype) for path, stored in own.items()},
        scales={
            path: written_scales(path, kernel, entries[path], sizes, functools.partial(on_host, meetings=meetings))
            for path, kernel in held.items()
        },
        copies=copies,
    )


def _config(name: str, form: Form, contents: _Contents, like: Path | None) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    chosen, plain = ARCHITECTURES[name], contents.plain()
    widest = max((stored for _, stored, _ in plain), key=lambda stored: stored.itemsize)
    # Null, since transformers' default for a missing token would be one of another vocabulary.
    values: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if like is not None:
        # `dtype` is the newer name of `torch_dtype`, which is set below: with both, transformers follows this one.
        theirs = json_file(like / CONFIG).items()
        values |= {key: value for key, value in theirs if key in NO_NUMBERS and key != "dtype"}
    if chosen.model is not T5Model:  # of which transformers has a factor for each kernel
        values[INITIAL_DEVIATION] = form.config.init_method_std
    values |= chosen.config_fields(form)
    values |= {"architectures": [name], "model_type": chosen.model_type, "torch_dtype": widest.name}
    if contents.scales:
        values["quantization_config"] = quantization_config([name for name, _, shape in plain if len(shape) == 2])
    return values


def _companions_of_save(folder: Path, like: Path | None) -> tuple[list[Path], list[Path]]:
    """Return the files of tokenizer and generation to copy, and those of an older model in the folder to remove.

    Raises:
        ValueError: for an older model with such files, if nothing says whose the new model's are.
    """
    there = companions(folder)
    if like is None:
        # Without a model they are for the one to come: a tokenizer may be saved first.
        if there and (folder / CONFIG).exists():
            raise ValueError(
                f"{folder} holds a model with {', '.join(path.name for path in there)}, which would stay beside the "
                f"new one: give like={str(folder)!r} if they are for this model, too; or like= with the folder whose "
                "they are; or another folder to write"
            )
        return [], []
    if folder.exists() and folder.samefile(like):
        return [], []
    given = companions(like)
    names = {path.name for path in given}
    return given, [path for path in there if path.name not in names]


def companions(folder: Path) -> list[Path]:
    """Return the paths of the files of the tokenizer and of generation that a folder has."""
    return [path for name in _COMPANIONS for path in sorted(folder.glob(name)) if path.is_file()]
