"""Adapters as folders in PEFT's format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jax_te._processes import Meetings
from jax_te._validation import checked, float_dtype
from jax_te._whole_files import whole_or_nothing
from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES
from jax_te.interop.huggingface.folder import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    check_adapter_config,
    check_no_model,
)
from jax_te.interop.huggingface.peft_kernels import AdaptableKernel, Matrices, adaptable_kernels
from jax_te.interop.huggingface.safetensors import write_file
from jax_te.interop.huggingface.save import known_architectures
from jax_te.interop.tables import (
    KnownModel,
    Sizes,
    architecture_of,
    check_no_run,
    converted,
    on_host,
    write_by_the_first,
)
from jax_te.layers import GroupedLoRA, LoRA, Router
from jax_te.models import GPTModel, T5Model
from jax_te.typing import DTypeLike


@checked
def save_peft(
    model: KnownModel,
    folder: str | Path,
    *,
    architecture: str | None = None,
    base: str | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Write the LoRA adapters of a model so that PEFT loads them for the model's form in transformers.

    Where one kernel here has several of transformers' layers, and one adapter, each of these gets the adapter's
    ``lora_A`` and its own part of ``lora_B``. An adapter of which both are zero is left out. The two files replace
    older ones when both are complete; a call that raises before leaves neither. With several processes all must call
    this, and the first one writes; if one fails, all raise, and none waits longer than ten minutes for a matrix.

    Args:
        model: a model of `jax_te.models` with `jax_te.layers.LoRA` around some of its linear layers.
        folder: folder to write; made if missing.
        architecture: name of the architecture, one of `ARCHITECTURES`. None: the first that can represent all options
            of the model.
        base: name or path of the model that is adapted, for ``base_model_name_or_path``.
        dtype: dtype of the tensors. None: the adapters'.

    Raises:
        ValueError: for a model without adapters, or with nothing but zeros; for adapters of layers that are trained,
            too (``freeze_base=False``), whose weights would be lost; of layers that the architecture does not have, of
            experts, and of parts of one of its layers; for routers whose biases training changes, see
            `jax_te.layers.Router`; for a folder that holds a model, a run's checkpoints, or an
            ``adapter_config.json`` of another library.
        OSError: if the first process cannot write; if it cannot give the complete files their names: the message says
            what to do; if another process fails, or is waited for in vain (TimeoutError).

    Source: ``PeftModel.save_pretrained`` of PEFT.

    >>> save_peft(model, "my-adapter", base="Llama-3.2-1B")  # doctest: +SKIP
    """
    folder = Path(folder)
    with Meetings("save_peft") as meetings:
        # Inside: a call that one process refuses counts for all, whose next calls meet again.
        dtype = None if dtype is None else float_dtype("dtype", dtype)
        name, form = architecture_of(model, known_architectures(architecture))
        kernels = {f"{kernel.owner}/{kernel.name}": kernel for kernel in adaptable_kernels(ARCHITECTURES[name], form)}
        matrices: dict[str, Matrices] = {}
        for owner, adapter in _adapters(model):
            for attribute in adapter.base.kernels:
                if (kernel := kernels.get(f"{owner}/{attribute}")) is None:
                    raise ValueError(f"{name} has no place for the adapter of {owner}/{attribute}; merge it")
                matrices |= _matrices_of(kernel, adapter, form.sizes(), meetings)
        if not matrices:
            raise ValueError("all adapters of the model are zero, and there is nothing to write")
        config = _config(model, matrices, [*kernels.values()], base)
        tensors = {
            (tensor := f"base_model.model.{module}.lora_{letter}.weight"): converted(
                array, dtype or array.dtype, tensor
            )
            for module, pair in sorted(matrices.items())
            for letter, array in (("A", pair.a), ("B", pair.b))
        }

        def in_turn() -> Iterator[tuple[str, np.ndarray]]:
            for tensor in tensors.items():
                meetings.meet()  # so that the others wait for one matrix, and not for the whole file
                yield tensor

        write_by_the_first(lambda stream: _write(folder, config, tensors, stream), in_turn(), meetings)


def _write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], stream: Iterator[tuple[str, np.ndarray]]
) -> None:
    """Write the two files of a folder.

    Args:
        folder: the folder.
        config: fields of ``adapter_config.json``.
        tensors: tensors by name.
        stream: the same tensors, in turn.
    """
    check_no_run(folder)
    check_no_model(folder)
    check_adapter_config(folder)
    plan = [(name, array.dtype, array.shape) for name, array in tensors.items()]
    with whole_or_nothing(folder) as new:
        write_file(new.part(ADAPTER_TENSORS), plan, stream)
        new.part(ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        # Not there while tensors are exchanged: an interrupted call leaves no tensors under the fields of others.
        new.replaces([folder / ADAPTER_CONFIG])


def _adapters(model: nnx.Module) -> list[tuple[str, LoRA]]:
    """Return the adapters of a model with their paths."""
    adapters = [
        ("/".join(map(str, path)), module) for path, module in nnx.iter_modules(model) if isinstance(module, LoRA)
    ]
    for path, adapter in adapters:
        if isinstance(adapter, GroupedLoRA):
            raise ValueError(f"{path} adapts experts, which have no such adapters in PEFT; merge it")
        if not adapter.base.frozen:
            raise ValueError(
                f"{path} adapts a layer that is trained, too (freeze_base=False, or merge() was called), and an "
                "adapter's folder holds no weights of it. Merge all adapters, put the bases in their places and write "
                "the model, save_huggingface; if the layer is still as it was loaded, set its base.frozen = True"
            )
    if not adapters:
        raise ValueError("the model has no adapters; put a LoRA around its linear layers, or save the model itself")
    _check_routers(model)
    return sorted(adapters, key=lambda pair: pair[0])


def _check_routers(model: nnx.Module) -> None:
    """Raise ValueError for a router whose bias training may have changed: an adapter's folder does not hold it."""
    for path, router in nnx.iter_modules(model):
        if isinstance(router, Router) and router.has_moving_bias:
            raise ValueError(
                f"training changes the bias by which {'/'.join(map(str, path))} balances its load, and an adapter's "
                "folder does not hold it. If the model was trained, merge all adapters, put the bases in their places "
                "and write the model, save_huggingface; if not, set the router's frozen = True, which also keeps the "
                "bias in training"
            )


def _matrices_of(kernel: AdaptableKernel, adapter: LoRA, sizes: Sizes, meetings: Meetings) -> dict[str, Matrices]:
    """Return the adapters of transformers' layers."""
    prefix = kernel.name.removesuffix("kernel")
    a, b = (on_host(getattr(adapter, f"{prefix}lora_{letter}").get_value(), meetings) for letter in "ab")
    modules, rank = kernel.modules, b.shape[0]
    parts = np.split(a, a.shape[1] // rank, axis=1)
    if len(parts) > 1 and (len(modules) == 1 or adapter.components != kernel.components(sizes)):
        raise ValueError(
            f"the adapter of {kernel.owner}/{kernel.name} has components={adapter.components}, and its layers in "
            f"transformers are {', '.join(modules)}; name the architecture whose layers these are, or merge it"
        )
    parts = parts if len(parts) > 1 else parts * len(modules)
    ours = dict(kernel.lora_b().write(b, {**sizes, "rank": rank}))
    matrices = {
        module: Matrices(np.ascontiguousarray(part.T), np.ascontiguousarray(ours[module]), adapter.scale)
        for module, part in zip(modules, parts, strict=True)
    }
    return {module: pair for module, pair in matrices.items() if pair.a.any() or pair.b.any()}


def _config(
    model: Any, matrices: Mapping[str, Matrices], kernels: list[AdaptableKernel], base: str | None
) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json``."""
    ranks = {module: pair.rank for module, pair in matrices.items()}
    alphas = {module: _alpha(pair.scale, pair.rank) for module, pair in matrices.items() if pair.scale is not None}
    (rank, alpha), _ = Counter((ranks[module], alphas[module]) for module in matrices).most_common(1)[0]
    tasks = {GPTModel: "CAUSAL_LM", T5Model: "SEQ_2_SEQ_LM"}
    return {
        "peft_type": "LORA",
        "task_type": tasks.get(type(model)),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        "alpha_pattern": {module: other for module, other in alphas.items() if other != alpha},
        "target_modules": sorted(matrices),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(kernel.transposed for kernel in kernels),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _alpha(scale: float, rank: int) -> float | int:
    """Return the number that over the rank is the scale, a whole one if there is one."""
    near = round(scale * rank)
    return near if near / rank == scale else scale * rank
