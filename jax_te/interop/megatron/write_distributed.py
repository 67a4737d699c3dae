"""Writing of Megatron-LM's format ``torch_dist``, which any number of ranks and stages loads."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_te.config import TransformerConfig
from jax_te.interop.megatron.expert_states import of_expert
from jax_te.interop.megatron.experts import stacked_name
from jax_te.interop.megatron.folder import COMMON
from jax_te.interop.tables import Form
from jax_te.interop.torch import (
    ExtraState,
    Piece,
    StoredTensor,
    write_extra_state,
    write_torch_distributed,
    write_torch_file,
)

ExpertStates = Sequence[tuple[int, str, ExtraState]]
"""FP8 states of experts: number of the layer, name of the linear layer, state."""

_MODULES = [f"self_attention.{name}" for name in ("linear_qkv", "linear_proj", "core_attention")]
_MODULES += [f"self_attention.{name}_layernorm" for name in ("q", "k")] + ["mlp.linear_fc1", "mlp.linear_fc2"]


def state_bytes(state: ExtraState) -> np.ndarray:
    """Return a state as the bytes that an ``_extra_state`` is."""
    return np.frombuffer(write_extra_state(state), np.uint8)


def write_distributed(
    folder: Path, tensors: Mapping[str, StoredTensor], common: Mapping[str, Any], states: ExpertStates, form: Form
) -> None:
    """Write the format ``torch_dist``: layers of one form, and experts, as one tensor with axes in front.

    Args:
        folder: folder to write.
        tensors: tensors of the model in Megatron's names.
        common: entries beside the model.
        states: FP8 states of experts: number of the layer, name of the linear layer, state.
        form: form of the model.
    """
    # Megatron-LM's own condition: layers that may differ have their numbers in the names.
    alike = form.config.num_moe_experts is None or form.config.moe_layer_freq == 1
    parts: dict[str, dict[tuple[int, ...], StoredTensor]] = {}
    for name, tensor in tensors.items():
        key, place = _distributed_name(name, alike)
        parts.setdefault(key, {})[place] = tensor
    entries: dict[str, Any] = {key: _joined(key, pieces) for key, pieces in parts.items()}
    for number in range(form.config.num_layers):
        entries |= {name: [None] for name in _extra_states(form.config, number, alike)}
    for number, name, state in states:
        for expert in range(state.gemms):
            entries[_expert_entry(form.config, number, alike, expert, name)] = [state_bytes(of_expert(state, expert))]
    entries["decoder.final_layernorm._extra_state/shard_0_1"] = [None]
    write_torch_distributed(folder, entries)
    write_torch_file(folder / COMMON, common)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def _distributed_name(name: str, alike: bool) -> tuple[str, tuple[int, ...]]:
    """Return the name in ``torch_dist`` of the tensor that holds one, and the place there: layer and expert, if any.

    >>> _distributed_name("decoder.layers.2.mlp.experts.linear_fc1.weight3", True)
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (2, 3))
    """
    place: tuple[int, ...] = ()
    if (expert := stacked_name(name)) is not None:
        name, place = expert[0], (expert[1],)
    layer = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.*)", name)
    return (name, place) if layer is None or not alike else (layer[1] + layer[3], (int(layer[2]), *place))


def _joined(name: str, parts: Mapping[tuple[int, ...], StoredTensor]) -> StoredTensor:
    """Return tensors as one, in which each is at its place along the axes in front."""
    first = next(iter(parts.values()))
    axes = tuple(1 + max(numbers) for numbers in zip(*parts, strict=True))
    if not axes:
        return first
    pieces = [
        Piece(
            (*place, *(0,) * one.ndim),
            (*(1,) * len(place), *one.shape),
            functools.partial(_with_axes_in_front, one, len(place)),
        )
        for place, one in parts.items()
    ]
    return StoredTensor((*axes, *first.shape), first.dtype, pieces, name)


def _extra_states(config: TransformerConfig, layer: int, alike: bool) -> list[str]:
    """Return the entries of a layer's ``_extra_state``, which Megatron-LM requires, empty without FP8."""
    mixture = config.num_moe_experts is not None and config.has_experts(layer)
    prefix = "decoder.layers" if alike else f"decoder.layers.{layer}"
    place, sizes = ((layer,), (config.num_layers,)) if alike else ((), ())
    modules = [name for name in _MODULES if not (mixture and name.startswith("mlp."))]
    modules += ["pre_mlp_layernorm"] if mixture else []
    if mixture and config.moe_shared_expert_intermediate_size is not None:
        modules += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    states = [f"{prefix}.{module}._extra_state/{_shard_name(place or (0,), sizes or (1,))}" for module in modules]
    for expert in range(config.num_moe_experts or 0 if mixture else 0):
        states += [_expert_entry(config, layer, alike, expert, name) for name in ("linear_fc1", "linear_fc2")]
    return states


def _expert_entry(config: TransformerConfig, layer: int, alike: bool, expert: int, name: str) -> str:
    """Return the entry of the ``_extra_state`` of an expert's linear layer."""
    prefix = "decoder.layers" if alike else f"decoder.layers.{layer}"
    place, sizes = ((layer,), (config.num_layers,)) if alike else ((), ())
    shard = _shard_name((*place, expert), (*sizes, config.num_moe_experts or 0))
    return f"{prefix}.mlp.experts.experts.{name}._extra_state/{shard}"


def _shard_name(place: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """Return the name of one object among those of a key, as ``ShardedObject`` of Megatron-Core has it."""
    return f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, sizes))}"


def _with_axes_in_front(tensor: StoredTensor, axes: int) -> np.ndarray:
    return np.asarray(tensor)[(None,) * axes]
