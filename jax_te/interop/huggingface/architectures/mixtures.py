"""Decoders with experts: Mixtral, the mixtures of Qwen 2 and Qwen 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax_te.interop.huggingface.architectures.decoders import (
    LLAMA,
    head_rows,
    llama_layer,
    read_block,
    read_window,
    read_windows,
    write_rotary,
    write_window,
    write_windows,
)
from jax_te.interop.huggingface.config_json import WINDOW, ConfigJson
from jax_te.interop.tables import Form, Options, Table, rows_of_layer

NORM: Table = {"layers/{i}/pre_mlp_layernorm/scale": {"model.layers.{i}.post_attention_layernorm.weight": "h -> h"}}
"""Row of the norm in front of experts."""


def expert_rows(block: str, gate: str, up: str, down: str) -> Table:
    """Return the rows of a layer's norm, router and experts.

    Args:
        block: name of the block in a layer.
        gate, up, down: names of an expert's linear layers.

    >>> [*expert_rows("mlp", "a", "b", "c")["layers/{i}/mlp/experts/linear_fc2/kernel"]]
    ['model.layers.{i}.mlp.experts.{e}.c.weight']
    """
    of_layer = f"model.layers.{{i}}.{block}"
    expert = f"{of_layer}.experts.{{e}}"
    return NORM | {
        "layers/{i}/mlp/router/kernel": {f"{of_layer}.gate.weight": "e h -> h e"},
        "layers/{i}/mlp/experts/linear_fc1/kernel": {
            f"{expert}.{gate}.weight": "m h -> h 1 m",
            f"{expert}.{up}.weight": "m h -> h 1 m",
        },
        "layers/{i}/mlp/experts/linear_fc2/kernel": {f"{expert}.{down}.weight": "h m -> m h"},
    }


def shared_expert_rows(name: str) -> Table:
    """Return the rows of a layer's shared experts, whose block in ``mlp`` has this name.

    >>> [*shared_expert_rows("shared_expert")["layers/{i}/mlp/shared_experts/linear_fc2/kernel"]]
    ['model.layers.{i}.mlp.shared_expert.down_proj.weight']
    """
    block = f"model.layers.{{i}}.mlp.{name}"
    return {
        "layers/{i}/mlp/shared_experts/linear_fc1/kernel": {
            f"{block}.gate_proj.weight": "u h -> h 1 u",
            f"{block}.up_proj.weight": "u h -> h 1 u",
        },
        "layers/{i}/mlp/shared_experts/linear_fc2/kernel": {f"{block}.down_proj.weight": "h u -> u h"},
    }


QWEN_EXPERTS = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
"""Rows of a layer's norm, router and experts under the names of most architectures."""

_MIXTRAL_EXPERTS = expert_rows("block_sparse_moe", "w1", "w3", "w2")
_SHARED_EXPERT: Table = shared_expert_rows("shared_expert") | {
    "layers/{i}/mlp/shared_experts/gate_kernel": {"model.layers.{i}.mlp.shared_expert_gate.weight": "y h -> h y"}
}


def mixture_rows(dense: Table, experts: Table) -> Table:
    """Return the rows of a layer with ``experts`` in place of the feed-forward block of the rows ``dense``.

    >>> mixture_rows({"layers/{i}/layernorm_mlp/scale": {}, "layers/{i}/self_attention/qkv/scale": {}}, {})
    {'layers/{i}/self_attention/qkv/scale': {}}
    """
    return {path: row for path, row in dense.items() if not path.startswith("layers/{i}/layernorm_mlp/")} | experts


def mixture_table(form: Form, dense: Table, experts: Table) -> Table:
    """Return the rows of a decoder.

    Args:
        form: form of the model.
        dense: rows of a layer without experts.
        experts: rows of a layer with experts, in place of those of its feed-forward block.
    """
    config, mixture = form.config, mixture_rows(dense, experts)
    table: Table = {"embedding/embedding": {"model.embed_tokens.weight": "v h -> v h"}}
    for number in range(config.num_layers):
        table |= rows_of_layer(mixture if config.has_experts(number) else dense, number)
    return table | {"final_norm/scale": {"model.norm.weight": "h -> h"}} | head_rows(form)


def _mixtral_table(form: Form) -> Table:
    return mixture_table(form, llama_layer(form.config), _MIXTRAL_EXPERTS)


def _qwen_table(form: Form) -> Table:
    shared = form.config.moe_shared_expert_intermediate_size is not None
    return mixture_table(form, llama_layer(form.config), QWEN_EXPERTS | (_SHARED_EXPERT if shared else {}))


def refuse_one_expert_read(given: ConfigJson, options: Options) -> None:
    """Raise ValueError for one expert per token of a class that weights experts by the softmax over the chosen ones."""
    if options["moe_router_topk"] == 1:
        why = "the weight of a token's only expert is then 1, and its router would have no gradient; 2 or more are read"
        raise given.refused("num_experts_per_tok", 1, why)


def refuse_one_expert_written(options: Options) -> None:
    """Raise ValueError for a model with one expert per token, where the class weights experts by the softmax over the
    chosen ones."""
    if options["num_moe_experts"] is not None and options["moe_router_topk"] == 1:
        raise ValueError(
            "moe_router_topk=1: this class weights a token's only expert by 1, and the model by the router's score "
            f"(moe_router_score_function={options['moe_router_score_function']!r}, "
            f"moe_router_pre_softmax={options['moe_router_pre_softmax']}), so that it would compute something else; "
            "save_megatron and TrainCheckpointer write the model as it is"
        )


def _read_mixtral(given: ConfigJson, options: Options) -> Options:
    refuse_one_expert_read(given, options)
    given.expect("router_jitter_noise", 0.0)  # of the experts' inputs, too; here only the router's have any
    positions = given.rotary(options["max_sequence_length"], 1e6)
    block = read_window(given, read_block(given, options, positions), given.optional("sliding_window", int, None))
    return {**block, "add_bias_linear": False}


def _write_mixtral(options: Options) -> dict[str, Any]:
    refuse_one_expert_written(options)
    return {**write_rotary(options), **write_window(options)}


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    fields={
        **{name: row for name, row in LLAMA.fields.items() if name != "intermediate_size"},
        "intermediate_size": ("moe_ffn_hidden_size", 14336),
        "num_local_experts": ("num_moe_experts", 8),
        "num_experts_per_tok": ("moe_router_topk", 2),
        "num_key_value_heads": ("num_query_groups", 8),
        "max_position_embeddings": ("max_sequence_length", 131072),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
    },
    read=_read_mixtral,
    write=_write_mixtral,
    table=_mixtral_table,
)


def _read_pre_softmax(given: ConfigJson, options: Options) -> bool:
    """Return whether the probabilities of the chosen experts are left as the softmax over all gives them."""
    if given.take("norm_topk_prob", bool, False):
        refuse_one_expert_read(given, options)
        return False
    return True


def _write_pre_softmax(options: Options) -> bool:
    """Return ``norm_topk_prob``, the inverse of `_read_pre_softmax`."""
    if not options["moe_router_pre_softmax"]:
        refuse_one_expert_written(options)
    return not options["moe_router_pre_softmax"]


def _read_qwen_experts(given: ConfigJson, options: Options) -> Options:
    """Return the options with those of a mixture of Qwen 2 or 3, but for its attention."""
    pre_softmax = _read_pre_softmax(given, options)
    return {
        **read_block(given, options),
        # transformers 5 writes Qwen 3's number under Mixtral's name.
        "num_moe_experts": given.take("num_local_experts", int, options["num_moe_experts"]),
        "moe_layer_freq": _layers_with_experts(given, options["num_layers"]),
        "moe_router_pre_softmax": pre_softmax,
        "add_bias_linear": False,
    }


def _layers_with_experts(given: ConfigJson, count: int) -> tuple[int, ...]:
    """Return 1 for each layer with experts, and 0 for the others."""
    step, dense = given.take("decoder_sparse_step", int, 1), given.take("mlp_only_layers", list, [])
    if step < 1:
        raise given.refused("decoder_sparse_step", step, "it must be positive")
    if not all(type(number) is int for number in dense):
        raise given.refused("mlp_only_layers", dense, "it must hold numbers of layers")
    return tuple(int((i + 1) % step == 0 and i not in dense) for i in range(count))


def _write_qwen_experts(options: Options) -> dict[str, Any]:
    """Return the fields of a mixture of Qwen 2 or 3, but for its windows."""
    freq, count = options["moe_layer_freq"], options["num_layers"]
    has: Sequence[int] = freq if isinstance(freq, tuple) else [int(i % freq == 0) for i in range(count)]
    return {
        **write_rotary(options),
        "num_experts": options["num_moe_experts"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, experts in enumerate(has) if not experts],
        "norm_topk_prob": _write_pre_softmax(options),
    }


def _read_qwen3_moe(given: ConfigJson, options: Options) -> Options:
    given.expect("attention_bias", False)
    # Of other classes, in the files of Qwen3-Coder.
    given.expect("qkv_bias", False)
    given.expect("use_qk_norm", True)
    given.expect("shared_expert_intermediate_size", 0)
    size, used = given.optional("sliding_window", int, 4096), given.take("use_sliding_window", bool, False)
    given.skip("max_window_layers")  # of other classes, in published files
    block = read_window(given, _read_qwen_experts(given, options), size if used else None)
    return {**block, "qk_layernorm": True}


def _write_qwen3_moe(options: Options) -> dict[str, Any]:
    window = write_window(options)
    return {**_write_qwen_experts(options), **window, "use_sliding_window": window["sliding_window"] is not None}


def _read_qwen2_moe(given: ConfigJson, options: Options) -> Options:
    given.expect("use_mrope", False)
    bias = given.take("qkv_bias", bool, True)
    size, first = given.take("sliding_window", int, 4096), given.take("max_window_layers", int, 28)
    used = given.take("use_sliding_window", bool, False)
    # As transformers' class counts: of the first layers every other one.
    windowed = [used and i % 2 == 0 and i < first for i in range(options["num_layers"])]
    block = read_windows(given, _read_qwen_experts(given, options), size if used else None, windowed)
    return {**block, "add_qkv_bias": bias, "moe_shared_expert_gate": True}


def _write_qwen2_moe(options: Options) -> dict[str, Any]:
    windows = write_windows(options)
    used = WINDOW in windows["layer_types"]
    return {
        **_write_qwen_experts(options),
        **windows,
        "use_sliding_window": used,
        "qkv_bias": options["add_qkv_bias"],
    }


def _read_olmoe(given: ConfigJson, options: Options) -> Options:
    given.expect("attention_bias", False)
    given.expect("clip_qkv", None)  # a limit of queries, keys and values, which the published models do not have
    return {
        **read_block(given, options),
        "moe_router_pre_softmax": _read_pre_softmax(given, options),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "add_bias_linear": False,
    }


def _write_olmoe(options: Options) -> dict[str, Any]:
    return {**write_rotary(options), "norm_topk_prob": _write_pre_softmax(options)}


_QWEN_FIELDS: dict[str, tuple[str, Any]] = {
    **LLAMA.fields,
    "vocab_size": ("vocab_size", 151936),
    "hidden_size": ("hidden_size", 2048),
    "num_hidden_layers": ("num_layers", 24),
    "max_position_embeddings": ("max_sequence_length", 32768),
}
QWEN2_MOE = replace(
    LLAMA,
    model_type="qwen2_moe",
    fields={
        **_QWEN_FIELDS,
        "intermediate_size": ("ffn_hidden_size", 5632),
        "num_attention_heads": ("num_attention_heads", 16),
        "num_key_value_heads": ("num_query_groups", 16),
        "moe_intermediate_size": ("moe_ffn_hidden_size", 1408),
        "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", 5632),
        "num_experts": ("num_moe_experts", 60),
        "num_experts_per_tok": ("moe_router_topk", 4),
    },
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    table=_qwen_table,
)
QWEN3_MOE = replace(
    LLAMA,
    model_type="qwen3_moe",
    fields={
        **_QWEN_FIELDS,
        "intermediate_size": ("ffn_hidden_size", 6144),
        "num_key_value_heads": ("num_query_groups", 4),
        "moe_intermediate_size": ("moe_ffn_hidden_size", 768),
        "num_experts": ("num_moe_experts", 128),
        "num_experts_per_tok": ("moe_router_topk", 8),
    },
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    table=_qwen_table,
)
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    fields={
        # Heads have the size that divides the hidden size.
        **{name: row for name, row in LLAMA.fields.items() if name not in ("intermediate_size", "head_dim")},
        "vocab_size": ("vocab_size", 50304),
        "hidden_size": ("hidden_size", 2048),
        "intermediate_size": ("moe_ffn_hidden_size", 2048),
        "num_hidden_layers": ("num_layers", 16),
        "num_attention_heads": ("num_attention_heads", 16),
        "max_position_embeddings": ("max_sequence_length", 4096),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
        "num_experts": ("num_moe_experts", 64),
        "num_experts_per_tok": ("moe_router_topk", 8),
    },
    read=_read_olmoe,
    write=_write_olmoe,
    table=_qwen_table,
)
