"""Models from Hugging Face folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import checked
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.huggingface.block_scaled import BlockScaled, Choice, hold_block_scaled, read_block_scaled, reader
from jax_te.interop.huggingface.capabilities import Architecture, Form
from jax_te.interop.huggingface.folder import CONFIG, json_file, open_tensors, without_lost_layers
from jax_te.interop.huggingface.mxfp4 import PackedMXFP4
from jax_te.interop.huggingface.tensor_patterns import Entry, is_state, stored_in
from jax_te.models import Execution
from jax_te.sharding import leaves_with_axes, shardings_of
from jax_te.typing import Array, DTypeLike

OnProgress = Callable[[int, int], None]
"""Function called after each parameter with the number of parameters done and the number of all."""

_EXECUTION = Execution()
_SHOWN = 20
"""The most tensors in a message."""


@checked
def load_huggingface(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    block_scaled: Choice | None = None,
    config: Mapping[str, Any] | None = None,
    execution: Execution = _EXECUTION,
    ignore_fields: Collection[str] = (),
    ignore_tensors: Collection[str] = (),
    on_progress: OnProgress | None = None,
) -> Any:
    """Return the model of a folder that transformers wrote, with its weights.

    The weights are read from ``model.safetensors``, or from the files of an index, parameter by parameter, and each
    device's part separately: a process reads only its devices' parts, and has one parameter in host memory at a time.
    On a mesh (``jax.set_mesh``) parameters are sharded by the ambient `jax_te.sharding.ShardingRules`. Under a recipe
    with state (`jax_te.recipe.autocast`) the model has new quantizer states.

    Every field of ``config.json`` is supported, known to have no effect, or refused by name. No code of the folder
    runs.

    Args:
        folder: folder with ``config.json``, whose ``architectures`` names one of `ARCHITECTURES`.
        dtype: dtype of the parameters. None: the tensors' dtype, which must be the same for all.
        block_scaled: treatment of tensors in FP8 with a scale for each block of 128 x 128 (``quantization_config``).
            ``"dequantize"``: their products in fp32, rounded once to ``dtype``; also of experts in MXFP4 (gpt-oss).
            ``"keep"``: kernels stay as they are, under the ambient recipe `jax_te.recipe.Float8BlockScaling`. None:
            such a folder is refused.
        config: fields of `jax_te.config.TransformerConfig` that say how the model runs, such as ``compute_dtype``,
            ``sequence_parallel`` and ``recompute_granularity``, or a dropout rate.
        execution: see `jax_te.models.Execution`.
        ignore_fields: names of fields of ``config.json`` that are unknown here and that you know to change no number.
            One that the model is built by is refused.
        ignore_tensors: names of tensors, or of modules with all of theirs, that are not read:
            ``["model.layers.61"]`` leaves the layer of multi-token prediction of DeepSeek-V3 out of the model.
        on_progress: function called after each parameter with the number of parameters done and the number of all.

    Returns:
        A model of `jax_te.models`: a `GPTModel` for decoders.

    Raises:
        ValueError: for a file that is missing, damaged or outside of the folder; an unsupported architecture or field;
            tensors of several dtypes without ``dtype``; an ignored name that no tensor has; a parameter that does not
            divide over the mesh; FP8 tensors without a choice, or which the recipe cannot keep.
        CheckpointMismatchError: for missing, unexpected and wrongly shaped tensors, all of which it lists.

    Source: ``from_pretrained`` of transformers.

    >>> model = load_huggingface("Llama-3.2-1B", dtype=jnp.bfloat16)  # doctest: +SKIP
    """
    folder = Path(folder)
    values = json_file(folder / CONFIG)
    stored, files = open_tensors(folder)
    stored = _without(stored, ignore_tensors, folder)
    values = without_lost_layers(values, stored)
    tensors = read_block_scaled(values, stored, block_scaled)
    architecture, form = read_form(values, str(folder / CONFIG), stored, ignore_fields)
    after = release_after_each(files, on_progress)
    return load_tensors(architecture, form, tensors, folder, after, dtype=dtype, config=config, execution=execution)


def release_after_each(files: Collection[Any], on_progress: OnProgress | None) -> OnProgress:
    """Return a function for `load_tensors` to call after each parameter, which releases the files' memory."""

    def after(done: int, count: int) -> None:
        for file in files:
            file.release()
        if on_progress is not None:
            on_progress(done, count)

    return after


def load_tensors(
    architecture: Architecture,
    form: Form,
    stored: Mapping[str, Any],
    folder: Path,
    after: OnProgress,
    *,
    dtype: DTypeLike | None,
    config: Mapping[str, Any] | None,
    execution: Execution,
) -> Any:
    """Return the model of a form with the tensors of a checkpoint.

    Args:
        architecture: architecture whose table names the tensors.
        form: form of the model.
        stored: arrays, or what ``np.asarray`` reads, by name.
        folder: folder of the checkpoint, for messages.
        after: function called after each parameter.
        dtype, config, execution: see `load_huggingface`.

    Raises:
        ValueError, CheckpointMismatchError: see `load_huggingface`.
    """
    sizes = form.sizes()
    entries = {path: Entry.of(pieces, sizes["e"]) for path, pieces in architecture.table(form).items()}
    tensors = _checked(architecture, form, stored, entries, folder)
    of_parameters = {name for path, entry in entries.items() if not is_state(path) for name in entry.names}
    form = form.run_as(config or {}, _one_dtype(dtype, [tensors[name] for name in of_parameters], folder))
    model = nnx.eval_shape(lambda: architecture.build(form, execution))
    hold_block_scaled(model, entries, tensors)
    graphdef, params, rest = nnx.split(model, stored_in(entries), ...)
    if jax.tree.leaves(rest):
        # Quantizer states get initial values; the compiler drops the random parameters.
        rest = jax.jit(lambda: nnx.state(architecture.build(form, execution), nnx.Not(stored_in(entries))))()
    mesh = jax.sharding.get_mesh()
    leaves = leaves_with_axes(params)
    places = [None] * len(leaves) if mesh.empty else shardings_of(params, mesh)
    arrays = []
    for (path, leaf, _), place in zip(leaves, places, strict=True):
        arrays.append(_placed(reader(path, entries, tensors, sizes), leaf, place))
        after(len(arrays), len(leaves))
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(params), arrays), rest)


def _without(stored: dict[str, np.ndarray], ignored: Collection[str], folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors whose names are not, and do not begin with, an ignored one."""
    left = dict(stored)
    for name in ignored:
        found = [each for each in stored if each == name or each.startswith(f"{name}.")]
        if not found:
            raise ValueError(f"ignore_tensors names {name!r}, and {folder} has no such tensor and no such module")
        for each in found:
            left.pop(each, None)
    return left


def _checked(
    architecture: Architecture, form: Form, stored: Mapping[str, Any], entries: Mapping[str, Entry], folder: Path
) -> dict[str, Any]:
    """Return the tensors that the entries name, after a check against the folder's."""
    sizes = form.sizes()
    wanted = {name: shape for entry in entries.values() for name, shape in entry.their_shapes(sizes).items()}
    tensors = _by_their_names(architecture, {**architecture.tied_names, **architecture.copies(form)}, stored, wanted)
    lines = _differences(tensors, wanted)
    if lines:
        more = f"\nand {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        lines = [line[:300] for line in lines[:_SHOWN]]
        raise CheckpointMismatchError(
            f"the tensors of {folder} are not those of its {architecture.described_by}:\n" + "\n".join(lines) + more
        )
    return tensors


def _by_their_names(
    architecture: Architecture, tied: Mapping[str, str], stored: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, Any]:
    """Return the tensors under the entries' names, without those that the model does not have.

    Args:
        architecture: architecture of the model.
        tied: tensors that may be there although they equal another: name → the other one's.
        stored: tensors of the folder.
        wanted: names of the entries' tensors.
    """
    for ending, name in architecture.older:
        stored = {re.sub(rf"{ending}$", name, each): tensor for each, tensor in stored.items()}
    base = architecture.base
    if not any(name.startswith(base) for name in stored):
        # Names of the model without its head lack the base's prefix.
        stored = {name if name in wanted else base + name: tensor for name, tensor in stored.items()}
    tensors = {name: tensor for name, tensor in stored.items() if not re.fullmatch(architecture.ignored, name)}
    for name, other in tied.items():
        twice = name in tensors and name not in wanted and other in tensors
        if twice and np.array_equal(tensors[name], tensors[other]):
            del tensors[name]
    return tensors


def _differences(tensors: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each tensor that is missing, unexpected or of another shape."""
    missing = [f"{name} is missing" for name in wanted if name not in tensors]
    unexpected = [f"{name} is unexpected" for name in tensors if name not in wanted]
    misshapen = [
        f"{name} is {list(tensors[name].shape)} and must be {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return missing + unexpected + misshapen


def _one_dtype(dtype: DTypeLike | None, tensors: Collection[Any], folder: Path) -> Any:
    if dtype is not None:
        return dtype
    found = {tensor.dtype for tensor in tensors if not isinstance(tensor, (BlockScaled, PackedMXFP4))}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise ValueError(f"the tensors of {folder} are of dtypes {names}; say with dtype= which the parameters have")
    return found.pop()


def _placed(read: Any, leaf: Any, place: Any) -> Array:
    """Return an array on its devices, each with its part."""
    if place is None:
        return jnp.asarray(read((slice(None),) * leaf.ndim, leaf.dtype))
    # Devices that hold the same part get it from one read.
    parts: dict[tuple[Any, ...], np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = tuple((each.start, each.stop) for each in index)
        if key not in parts:
            parts[key] = read(index, leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, place, part)
