"""T5, T5 v1.1 and mT5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_te.interop.huggingface.config_json import ACTIVATIONS, ConfigJson, activation_name
from jax_te.interop.huggingface.folder import CONFIG
from jax_te.interop.tables import TIED, Architecture, Form, Options, Table, layer_rows, model_options
from jax_te.models import Multipliers, RelativePositions, T5Model

_STACK: Table = {
    "{ours}_layers/{i}/self_attention/qkv/scale": {"{ours}.block.{i}.layer.0.layer_norm.weight": "h -> h"},
    "{ours}_layers/{i}/self_attention/qkv/kernel": {
        "{ours}.block.{i}.layer.0.SelfAttention.q.weight": "(g d) h -> h 1 (g d)",
        "{ours}.block.{i}.layer.0.SelfAttention.k.weight": "(g d) h -> h 1 (g d)",
        "{ours}.block.{i}.layer.0.SelfAttention.v.weight": "(g d) h -> h 1 (g d)",
    },
    "{ours}_layers/{i}/self_attention/proj/kernel": {"{ours}.block.{i}.layer.0.SelfAttention.o.weight": "h q -> q h"},
    "{ours}_layers/{i}/layernorm_mlp/scale": {"{ours}.block.{i}.layer.{last}.layer_norm.weight": "h -> h"},
    "{ours}_layers/{i}/layernorm_mlp/wo_kernel": {
        "{ours}.block.{i}.layer.{last}.DenseReluDense.wo.weight": "h f -> f h"
    },
}
_ONE = {"{ours}.block.{i}.layer.{last}.DenseReluDense.wi.weight": "f h -> h 1 f"}
_GATED = {
    "{ours}.block.{i}.layer.{last}.DenseReluDense.wi_0.weight": "f h -> h 1 f",
    "{ours}.block.{i}.layer.{last}.DenseReluDense.wi_1.weight": "f h -> h 1 f",
}
_CROSS: Table = {
    "decoder_layers/{i}/inter_attention/query/scale": {"decoder.block.{i}.layer.1.layer_norm.weight": "h -> h"},
    "decoder_layers/{i}/inter_attention/query/kernel": {
        "decoder.block.{i}.layer.1.EncDecAttention.q.weight": "(g d) h -> h 1 (g d)"
    },
    "decoder_layers/{i}/inter_attention/key_value/kernel": {
        "decoder.block.{i}.layer.1.EncDecAttention.k.weight": "(g d) h -> h 1 (g d)",
        "decoder.block.{i}.layer.1.EncDecAttention.v.weight": "(g d) h -> h 1 (g d)",
    },
    "decoder_layers/{i}/inter_attention/proj/kernel": {
        "decoder.block.{i}.layer.1.EncDecAttention.o.weight": "h q -> q h"
    },
}

_LM_HEAD = "lm_head.weight"
_TIED = (_LM_HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _table(form: Form) -> Table:
    gated = activation_name(form.config.activation, gated=True) is not None
    stack = _STACK | {"{ours}_layers/{i}/layernorm_mlp/wi_kernel": _GATED if gated else _ONE}
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    table = {"embedding/embedding": {"shared.weight": "v h -> v h"}}
    for ours, last in (("encoder", "1"), ("decoder", "2")):
        count = form.config.num_layers if ours == "decoder" else form.others["encoder_num_layers"]
        table |= layer_rows(stack, count, ours=ours, last=last)
        table |= {f"{ours}_bias/embedding": {f"{ours}.{bias}": "b n -> b n"}}
        table |= {f"{ours}_norm/scale": {f"{ours}.final_layer_norm.weight": "h -> h"}}
    head = {} if form.others[TIED] else {"output_kernel": {_LM_HEAD: "v h -> h v"}}
    return table | layer_rows(_CROSS, form.config.num_layers) | head


def _read_t5(given: ConfigJson, options: Options) -> Options:
    # Versions of transformers differ: in older ones tie_word_embeddings says both; in newer ones the second field says
    # whether the head's input is scaled, and a head that is among the tensors is one of its own.
    shared = given.take("tie_word_embeddings", bool, True)
    scaled = given.take("scale_decoder_outputs", bool, shared)
    return {
        **_read_stacks(given, options, "relu"),
        TIED: (shared and scaled) or not _has_head(given, not shared),
        "multipliers": Multipliers(head=max(options["hidden_size"], 1) ** -0.5 if scaled else 1.0),
    }


def _read_mt5(given: ConfigJson, options: Options) -> Options:
    # transformers 5 ignores the field: a head that is among the tensors is one of its own, and its input is not scaled.
    shared = given.take("tie_word_embeddings", bool, True)
    return {**_read_stacks(given, options, "gated-gelu"), TIED: not _has_head(given, not shared)}


def _has_head(given: ConfigJson, told: bool) -> bool:
    """Return whether a head of its own is among the tensors, or ``told`` where only their number is known."""
    return told if isinstance(given.tensors, range) else _LM_HEAD in given.tensors


def _read_stacks(given: ConfigJson, options: Options, default: str) -> Options:
    """Return the options with those of encoder and decoder; ``default`` is the feed-forward blocks' activation."""
    given.expect("is_decoder", False)
    projection = given.take("feed_forward_proj", str, default)
    gated = projection.startswith("gated-")
    name = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise given.refused("feed_forward_proj", projection, f"known activations: {', '.join(ACTIVATIONS)}")
    given.expect("dense_act_fn", name)
    given.expect("is_gated_act", gated)
    buckets = given.take("relative_attention_num_buckets", int, 32)
    positions = RelativePositions(buckets, given.take("relative_attention_max_distance", int, 128))
    return {
        **options,
        "activation": ACTIVATIONS[name][gated],
        "position_embedding_type": positions,
        "num_layers": options["num_layers"] or options["encoder_num_layers"],
        "attention_dropout": options["hidden_dropout"],
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "softmax_scale": 1.0,
    }


def _write_t5(options: Options) -> dict[str, Any]:
    return {**_write_stacks(options), "scale_decoder_outputs": options["multipliers"].head != 1.0}


def _write_stacks(options: Options) -> dict[str, Any]:
    gated = activation_name(options["activation"], gated=True)
    positions = options["position_embedding_type"]
    relative = isinstance(positions, RelativePositions)
    return {
        "feed_forward_proj": f"gated-{gated}".replace("gelu_new", "gelu")
        if gated
        else activation_name(options["activation"], gated=False),
        "relative_attention_num_buckets": positions.num_buckets if relative else None,
        "relative_attention_max_distance": positions.max_distance if relative else None,
        "tie_word_embeddings": options[TIED],
        "is_encoder_decoder": True,
    }


def _options(model: Any) -> Options:
    bias = model.encoder_bias
    relative = bias and RelativePositions(bias.num_buckets, bias.max_distance)
    return model_options(model, relative) | {"encoder_num_layers": len(model.encoder_layers)}


T5 = Architecture(
    model_type="t5",
    model=T5Model,
    fields={
        "vocab_size": ("vocab_size", 32128),
        "d_model": ("hidden_size", 512),
        "d_kv": ("kv_channels", 64),
        "d_ff": ("ffn_hidden_size", 2048),
        "num_layers": ("encoder_num_layers", 6),
        "num_decoder_layers": ("num_layers", None),
        "num_heads": ("num_attention_heads", 8),
        "n_positions": ("max_sequence_length", 512),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-6),
        "dropout_rate": ("hidden_dropout", 0.1),
    },
    read=_read_t5,
    write=_write_t5,
    table=_table,
    options=_options,
    base="",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names=dict.fromkeys(_TIED, "shared.weight"),
    ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
MT5 = replace(
    T5,
    model_type="mt5",
    fields={
        **T5.fields,
        "vocab_size": ("vocab_size", 250112),
        "d_ff": ("ffn_hidden_size", 1024),
        "num_layers": ("encoder_num_layers", 8),
        "num_heads": ("num_attention_heads", 6),
    },
    read=_read_mt5,
    write=_write_stacks,
)
