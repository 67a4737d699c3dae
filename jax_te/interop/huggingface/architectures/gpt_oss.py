"""gpt-oss: a decoder with experts, learned sinks, alternating windows and biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_te.interop.huggingface.architectures.decoders import LLAMA, llama_layer, read_windows, write_windows
from jax_te.interop.huggingface.architectures.mixtures import (
    NORM,
    mixture_table,
    refuse_one_expert_read,
    refuse_one_expert_written,
)
from jax_te.interop.huggingface.config_json import ConfigJson, rotary_fields
from jax_te.interop.tables import Form, Options, Table
from jax_te.layers import YarnScaling
from jax_te.models import RotaryPositions

_BASE, _LIMIT, _ALPHA = 150000.0, 7.0, 1.702
_ROUTER, _EXPERTS = "model.layers.{i}.mlp.router", "model.layers.{i}.mlp.experts"
_SINKS: Table = {
    "layers/{i}/self_attention/core_attention/softmax_offset": {"model.layers.{i}.self_attn.sinks": "n -> n"}
}
# Tensors of all experts together, whose gate and linear features take turns.
_EXPERT_ROWS: Table = NORM | {
    "layers/{i}/mlp/router/kernel": {f"{_ROUTER}.weight": "e h -> h e"},
    "layers/{i}/mlp/router/bias": {f"{_ROUTER}.bias": "e -> e"},
    "layers/{i}/mlp/experts/linear_fc1/kernel": {f"{_EXPERTS}.gate_up_proj": "e h (m a) -> e h a m"},
    "layers/{i}/mlp/experts/linear_fc1/bias": {f"{_EXPERTS}.gate_up_proj_bias": "e (m a) -> e a m"},
    "layers/{i}/mlp/experts/linear_fc2/kernel": {f"{_EXPERTS}.down_proj": "e m h -> e m h"},
    "layers/{i}/mlp/experts/linear_fc2/bias": {f"{_EXPERTS}.down_proj_bias": "e h -> e h"},
}


def _table(form: Form) -> Table:
    return mixture_table(form, llama_layer(form.config) | _SINKS, _EXPERT_ROWS)


def _read(given: ConfigJson, options: Options) -> Options:
    refuse_one_expert_read(given, options)
    given.expect("hidden_act", "silu")  # the name of another function than the class computes
    given.expect("swiglu_alpha", _ALPHA)
    given.expect("attention_bias", True)
    # Of the program that wrote the first files.
    given.expect("experts_per_token", options["moe_router_topk"])
    given.skip("initial_context_length")
    length = options["max_sequence_length"]
    # Without positions in the file the class has those of the published models.
    positions = given.rotary(length, _BASE) if given.has("rope_scaling", "rope_parameters") else _published(given)
    windowed = [number % 2 == 0 for number in range(options["num_layers"])]
    return {
        **read_windows(given, options, given.take("sliding_window", int, 128), windowed),
        "activation": "qgeglu",
        "activation_func_clamp_value": given.take("swiglu_limit", float, _LIMIT),
        "glu_linear_offset": 1.0,
        "position_embedding_type": positions,
        "normalization": "RMSNorm",
        "softmax_type": "learnable",
    }


def _published(given: ConfigJson) -> RotaryPositions:
    base = given.take("rope_theta", float, _BASE)
    return RotaryPositions(base=base, scaling=YarnScaling(factor=32.0, round_range=False))


def _write(options: Options) -> dict[str, Any]:
    refuse_one_expert_written(options)
    rotary = rotary_fields(options["position_embedding_type"])
    if rotary and rotary["rope_scaling"] is None:
        rotary["rope_scaling"] = {"rope_type": "default"}  # which null is not for this class
    windows = write_windows(options)
    if windows["sliding_window"] is None:
        windows["sliding_window"] = 128  # the class makes the mask of a window in any case
    return {
        **rotary,
        **windows,
        "hidden_act": "silu",
        "swiglu_limit": options["activation_func_clamp_value"],
        "attention_bias": True,
    }


GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    fields={
        **{name: row for name, row in LLAMA.fields.items() if name != "intermediate_size"},
        "vocab_size": ("vocab_size", 201088),
        "hidden_size": ("hidden_size", 2880),
        "intermediate_size": ("moe_ffn_hidden_size", 2880),
        "num_hidden_layers": ("num_layers", 36),
        "num_attention_heads": ("num_attention_heads", 64),
        "num_key_value_heads": ("num_query_groups", 8),
        "head_dim": ("kv_channels", 64),
        "max_position_embeddings": ("max_sequence_length", 131072),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
        "num_local_experts": ("num_moe_experts", 128),
        "num_experts_per_tok": ("moe_router_topk", 4),
    },
    read=_read,
    write=_write,
    table=_table,
)
