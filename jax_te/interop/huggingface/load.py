"""Models from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import checked
from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.huggingface.block_scaled import Choice, hold_block_scaled, read_block_scaled, reader
from jax_te.interop.huggingface.folder import CONFIG, json_file, open_tensors, without_lost_layers
from jax_te.interop.tables import OnProgress, load_tensors, release_after_each
from jax_te.models import Execution
from jax_te.typing import DTypeLike

_EXECUTION = Execution()


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
            divide over the mesh; FP8 tensors without a choice, or which the recipe cannot keep; a field of ``config``
            that ``config.json`` or ``dtype`` decides.
        TypeError: for a field of ``config`` that is none of `jax_te.config.TransformerConfig`.
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
    after_each = release_after_each(files, on_progress)
    return load_tensors(
        architecture,
        form,
        tensors,
        folder,
        after_each,
        dtype=dtype,
        config=config,
        execution=execution,
        prepare=hold_block_scaled,
        reader=reader,
    )


def _without(stored: dict[str, np.ndarray], ignored: Collection[str], folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors whose names are not, and do not begin with, an ignored one."""
    left = dict(stored)
    for name in ignored:
        found = [tensor for tensor in stored if tensor == name or tensor.startswith(f"{name}.")]
        if not found:
            raise ValueError(f"ignore_tensors names {name!r}, and {folder} has no such tensor and no such module")
        for tensor in found:
            left.pop(tensor, None)
    return left
