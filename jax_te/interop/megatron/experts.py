"""Experts in checkpoints of Megatron-LM: flags, tensors, and the parts of expert-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_te._validation import log_once
from jax_te.config import UNREAD_BY_BALANCING, TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.tables import Fields, Options, Table

_FLAGS: dict[str, tuple[type, Any]] = {
    "moe_ffn_hidden_size": (int, None),
    "moe_router_topk": (int, 2),
    "moe_router_score_function": (str, "softmax"),
    "moe_router_pre_softmax": (bool, False),
    "moe_router_topk_scaling_factor": (float, None),
    "moe_router_num_groups": (int, None),
    "moe_router_group_topk": (int, None),
    "moe_router_enable_expert_bias": (bool, False),
    "moe_router_bias_update_rate": (float, 1e-3),
    "moe_router_dtype": (str, None),
    "moe_shared_expert_intermediate_size": (int, None),
    "moe_shared_expert_gate": (bool, False),
    "moe_latent_size": (int, None),
    "moe_apply_probs_on_input": (bool, False),
    "moe_expert_capacity_factor": (float, None),
    "moe_pad_expert_input_to_capacity": (bool, False),
    "moe_token_drop_policy": (str, "probs"),
    "moe_z_loss_coeff": (float, None),
    "moe_input_jitter_eps": (float, None),
}
"""Flags whose names are those of our options, with their types and defaults."""

_RAW = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_ROUTER, _EXPERTS = "decoder.layers.{i}.mlp.router", "decoder.layers.{i}.mlp.experts"
_SHARED = "decoder.layers.{i}.mlp.shared_experts"
_ROWS: Table = {
    "layers/{i}/pre_mlp_layernorm/scale": {"decoder.layers.{i}.pre_mlp_layernorm.weight": "h -> h"},
    "layers/{i}/mlp/router/kernel": {f"{_ROUTER}.weight": "e h -> h e"},
    "layers/{i}/mlp/experts/linear_fc1/kernel": {f"{_EXPERTS}.linear_fc1.weight{{e}}": "(a m) k -> k a m"},
    "layers/{i}/mlp/experts/linear_fc2/kernel": {f"{_EXPERTS}.linear_fc2.weight{{e}}": "k m -> m k"},
}
_NORM_BIAS: Table = {"layers/{i}/pre_mlp_layernorm/bias": {"decoder.layers.{i}.pre_mlp_layernorm.bias": "h -> h"}}
_BIASES: Table = {
    "layers/{i}/mlp/router/bias": {f"{_ROUTER}.bias": "e -> e"},
    "layers/{i}/mlp/experts/linear_fc1/bias": {f"{_EXPERTS}.linear_fc1.bias{{e}}": "(a m) -> a m"},
    "layers/{i}/mlp/experts/linear_fc2/bias": {f"{_EXPERTS}.linear_fc2.bias{{e}}": "k -> k"},
}
_EXPERT_BIAS: Table = {"layers/{i}/mlp/router/expert_bias": {f"{_ROUTER}.expert_bias": "e -> e"}}
_QUANTILE_BIAS: Table = {"layers/{i}/mlp/router/quantile_bias": {f"{_ROUTER}.qb_beta": "e -> e+1"}}
_SHARED_ROWS: Table = {
    "layers/{i}/mlp/shared_experts/linear_fc1/kernel": {f"{_SHARED}.linear_fc1.weight": "(a u) h -> h a u"},
    "layers/{i}/mlp/shared_experts/linear_fc2/kernel": {f"{_SHARED}.linear_fc2.weight": "h u -> u h"},
}
_GATE: Table = {"layers/{i}/mlp/shared_experts/gate_kernel": {f"{_SHARED}.gate_weight": "y h -> h y"}}
_LATENT: Table = {
    "layers/{i}/mlp/fc1_latent_proj/kernel": {"decoder.layers.{i}.mlp.fc1_latent_proj.weight": "k h -> h k"},
    "layers/{i}/mlp/fc2_latent_proj/kernel": {"decoder.layers.{i}.mlp.fc2_latent_proj.weight": "h k -> k h"},
}
_EXPERT = re.compile(r"(.*\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})")
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d{1,6})\.(linear_fc[12]\.(?:weight|bias))$")
_STACKED = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias)(?:_[wv])?)")


def expert_rows(config: TransformerConfig) -> Table:
    """Return the rows of a layer with experts, in place of those of its feed-forward block."""
    gated = config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size is not None
    rows = dict(_ROWS)
    for has, more in (
        (config.normalization == "LayerNorm", _NORM_BIAS),
        (config.add_bias_linear, _BIASES),
        (config.moe_router_enable_expert_bias, _EXPERT_BIAS),
        (config.moe_router_load_balancing_type == "quantile_balancing", _QUANTILE_BIAS),
        (config.moe_shared_expert_intermediate_size is not None, _SHARED_ROWS),
        (gated, _GATE),
        (config.moe_latent_size is not None, _LATENT),
    ):
        rows |= more if has else {}
    return rows


def read_experts(given: Fields) -> Options:
    """Return the options of experts that Megatron-LM's flags describe; none for a model without them."""
    count = given.take("num_experts", int, None)
    if count is None:
        return {}
    frequency = given.raw("moe_layer_freq")
    raw = {name: given.raw(name) for name in _RAW}
    flags = {name: given.take(name, kind, default) for name, (kind, default) in _FLAGS.items()}
    return {
        "num_moe_experts": count,
        "moe_layer_freq": 1 if frequency is None else frequency,
        **_without_unread(flags, raw["moe_router_load_balancing_type"]),
        **{name: value for name, value in raw.items() if value is not None},
    }


def _without_unread(flags: Options, balancing: Any) -> Options:
    """Return flags with the defaults of those that Megatron does not read under a method of load balancing.

    A config with another value would be refused.
    """
    unread = UNREAD_BY_BALANCING.get(balancing, {}) if isinstance(balancing, str) else {}
    defaults = {f"moe_router_{name}": default for name, default in unread.items()}
    for name, default in defaults.items():
        if flags[name] != default:
            log_once(f"{name}={flags[name]!r} of the checkpoint is left out: load balancing {balancing!r} ignores it")
    return {**flags, **defaults}


def without_unread_bias(
    tensors: Mapping[str, Any], args: Mapping[str, Any], config: TransformerConfig
) -> Mapping[str, Any]:
    """Return tensors without an expert bias that Megatron's router has, and does not read: see `UNREAD_BY_BALANCING`.

    Args:
        tensors: tensors of the checkpoint.
        args: its arguments.
        config: configuration that they gave.
    """
    if config.moe_router_enable_expert_bias or not args.get("moe_router_enable_expert_bias"):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(".mlp.router.expert_bias")}


def write_experts(options: Options) -> Mapping[str, Any]:
    """Return Megatron-LM's flags of a model's experts; none for a model without them."""
    if options["num_moe_experts"] is None:
        return {"num_experts": None}
    flags = {name: options[name] for name in (*_FLAGS, *_RAW, "moe_layer_freq")}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    return {"num_experts": options["num_moe_experts"], "moe_grouped_gemm": True, **listed}


def grouped_name(name: str) -> str:
    """Return the name that ``TEGroupedMLP`` has for a tensor of ``SequentialMLP``.

    >>> grouped_name("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    'decoder.layers.0.mlp.experts.linear_fc1.weight3'
    """
    return _SEQUENTIAL.sub(r"\g<1>\g<3>\g<2>", name)


def sequential_names(name: str, rows: int) -> list[str] | None:
    """Return the names in ``SequentialMLP`` of what ``torch_dist`` stores as one tensor with an axis of experts.

    Args:
        name: name of a tensor in ``torch_dist``.
        rows: size of its first axis.

    Returns:
        A name for each expert, None for a tensor of something else.

    >>> sequential_names("decoder.layers.0.mlp.experts.experts.linear_fc2.weight", 1)
    ['decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight']
    """
    match = _STACKED.fullmatch(name)
    return None if match is None else [f"{match[1]}local_experts.{i}.{match[2]}" for i in range(rows)]


def stacked_name(name: str) -> tuple[str, int] | None:
    """Return the name in ``torch_dist`` of the tensor that holds an expert's, and the expert's number, else None.

    >>> stacked_name("decoder.layers.0.mlp.experts.linear_fc1.weight3")
    ('decoder.layers.0.mlp.experts.experts.linear_fc1.weight', 3)
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match[1].replace(".mlp.experts.", ".mlp.experts.experts."), int(match[2]))


def grouped(tensors: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return tensors under the names of ``TEGroupedMLP``.

    Raises:
        CheckpointMismatchError: for an expert that is there twice, under the names of both forms.
    """
    by_name = {grouped_name(name): tensor for name, tensor in tensors.items()}
    if len(by_name) < len(tensors):
        twice = sorted(name for name in tensors if grouped_name(name) != name and grouped_name(name) in tensors)
        raise CheckpointMismatchError(f"{what} has experts twice, grouped and one by one: {', '.join(twice[:8])}")
    return by_name


def experts_of_rank(tensors: Mapping[str, Any]) -> int:
    """Return the number of experts in the state dict of a rank.

    >>> experts_of_rank({"a.mlp.experts.local_experts.3.linear_fc1.weight": 1})
    4
    """
    numbers = [int(match[2]) for name in tensors if (match := _EXPERT.fullmatch(grouped_name(name)))]
    return max(numbers, default=-1) + 1


def joined_experts(ranks: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Return the tensors of several expert-parallel ranks, each of which numbers its experts from 0.

    Args:
        ranks: tensors of each rank, under grouped names.
        what: the checkpoint, for messages.

    Raises:
        CheckpointMismatchError: for ranks that differ in other tensors than experts, such as the bias of experts, or
            in the number of experts; and for numbers of experts with gaps.

    >>> ranks = [{"a.mlp.experts.linear_fc1.weight0": 1}, {"a.mlp.experts.linear_fc1.weight0": 2}]
    >>> joined_experts(ranks, "a checkpoint")
    {'a.mlp.experts.linear_fc1.weight0': 1, 'a.mlp.experts.linear_fc1.weight1': 2}
    """
    joined = dict(ranks[0])
    count = _experts_of_a_rank(ranks, what)
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            if match := _EXPERT.fullmatch(name):
                joined[f"{match[1]}{int(match[2]) + rank * count}"] = tensor
            elif rank and tensor_bits(tensor) != tensor_bits(ranks[0][name]):
                raise CheckpointMismatchError(
                    f"{what}: {name[:200]} must be the same on all expert ranks, and differs on ranks 0 and {rank}; "
                    "one of the files is of another step or run"
                )
    return joined


def _experts_of_a_rank(ranks: Sequence[Mapping[str, Any]], what: str) -> int:
    """Return the number of experts of each rank."""
    if len(ranks) == 1:
        return 0
    numbers: dict[str, set[int]] = {}
    for name in ranks[0]:
        if match := _EXPERT.fullmatch(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    count = max((len(own) for own in numbers.values()), default=0)
    gaps = [name for name, own in numbers.items() if own != {*range(count)}]
    differing = [
        f"{name[:200]} on rank {0 if name in ranks[0] else rank} alone"
        for rank, tensors in enumerate(ranks)
        for name in sorted(tensors.keys() ^ ranks[0].keys())
    ]
    if gaps or differing:
        lines = [f"{name}N are not numbered from 0 to {count - 1}" for name in gaps] + differing
        raise CheckpointMismatchError(
            f"{what}: expert ranks must have the same tensors, and as many experts each: {'; '.join(lines[:8])}"
        )
    return count


def tensor_bits(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return what two equal tensors share: dtype, shape and bytes.

    >>> tensor_bits(np.zeros(2, np.uint8))
    ('uint8', (2,), b'\\x00\\x00')
    """
    return str(tensor.dtype), tuple(tensor.shape), np.asarray(tensor).tobytes()
