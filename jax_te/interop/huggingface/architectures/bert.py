"""BERT and RoBERTa: the encoder with its pooler, and with its head for masked tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_te.interop.huggingface.config_json import ConfigJson, activation_name
from jax_te.interop.huggingface.folder import CONFIG
from jax_te.interop.tables import Architecture, Form, Options, Table, layer_rows
from jax_te.models import BertModel

_ONCE: Table = {
    "embedding/embedding": {"{base}embeddings.word_embeddings.weight": "v h -> v h"},
    "position_embedding/embedding": {"{base}embeddings.position_embeddings.weight": "s h -> s h"},
    "tokentype_embedding/embedding": {"{base}embeddings.token_type_embeddings.weight": "t h -> t h"},
    "embedding_norm/scale": {"{base}embeddings.LayerNorm.weight": "h -> h"},
    "embedding_norm/bias": {"{base}embeddings.LayerNorm.bias": "h -> h"},
}
_LAYER: Table = {
    "layers/{i}/self_attention/qkv/kernel": {
        "{base}encoder.layer.{i}.attention.self.query.weight": "(g d) h -> h 1 (g d)",
        "{base}encoder.layer.{i}.attention.self.key.weight": "(g d) h -> h 1 (g d)",
        "{base}encoder.layer.{i}.attention.self.value.weight": "(g d) h -> h 1 (g d)",
    },
    "layers/{i}/self_attention/qkv/bias": {
        "{base}encoder.layer.{i}.attention.self.query.bias": "(g d) -> 1 (g d)",
        "{base}encoder.layer.{i}.attention.self.key.bias": "(g d) -> 1 (g d)",
        "{base}encoder.layer.{i}.attention.self.value.bias": "(g d) -> 1 (g d)",
    },
    "layers/{i}/self_attention/proj/kernel": {"{base}encoder.layer.{i}.attention.output.dense.weight": "h q -> q h"},
    "layers/{i}/self_attention/proj/bias": {"{base}encoder.layer.{i}.attention.output.dense.bias": "h -> h"},
    # After the first residual sum, before the feed-forward block.
    "layers/{i}/layernorm_mlp/scale": {"{base}encoder.layer.{i}.attention.output.LayerNorm.weight": "h -> h"},
    "layers/{i}/layernorm_mlp/ln_bias": {"{base}encoder.layer.{i}.attention.output.LayerNorm.bias": "h -> h"},
    "layers/{i}/layernorm_mlp/wi_kernel": {"{base}encoder.layer.{i}.intermediate.dense.weight": "f h -> h 1 f"},
    "layers/{i}/layernorm_mlp/wi_bias": {"{base}encoder.layer.{i}.intermediate.dense.bias": "f -> 1 f"},
    "layers/{i}/layernorm_mlp/wo_kernel": {"{base}encoder.layer.{i}.output.dense.weight": "h f -> f h"},
    "layers/{i}/layernorm_mlp/wo_bias": {"{base}encoder.layer.{i}.output.dense.bias": "h -> h"},
    "layers/{i}/layernorm/scale": {"{base}encoder.layer.{i}.output.LayerNorm.weight": "h -> h"},
    "layers/{i}/layernorm/bias": {"{base}encoder.layer.{i}.output.LayerNorm.bias": "h -> h"},
}
_POOLER: Table = {
    "pooler/kernel": {"{base}pooler.dense.weight": "o h -> h o"},
    "pooler/bias": {"{base}pooler.dense.bias": "h -> h"},
}
_BERT_HEAD: Table = {
    "head_dense/kernel": {"cls.predictions.transform.dense.weight": "o h -> h o"},
    "head_dense/bias": {"cls.predictions.transform.dense.bias": "h -> h"},
    "head_norm/scale": {"cls.predictions.transform.LayerNorm.weight": "h -> h"},
    "head_norm/bias": {"cls.predictions.transform.LayerNorm.bias": "h -> h"},
    "output_bias": {"cls.predictions.bias": "v -> v"},
}


_ROBERTA_HEAD: Table = {
    "head_dense/kernel": {"lm_head.dense.weight": "o h -> h o"},
    "head_dense/bias": {"lm_head.dense.bias": "h -> h"},
    "head_norm/scale": {"lm_head.layer_norm.weight": "h -> h"},
    "head_norm/bias": {"lm_head.layer_norm.bias": "h -> h"},
    "output_bias": {"lm_head.bias": "v -> v"},
}


def _bert_table(form: Form) -> Table:
    return _encoder_table(form, "bert.", _BERT_HEAD)


def _roberta_table(form: Form) -> Table:
    return _encoder_table(form, "roberta.", _ROBERTA_HEAD)


def _encoder_table(form: Form, prefix: str, head: Table) -> Table:
    """Return the tensors of an encoder; beside the rows of a ``head`` their names begin with ``prefix``."""
    headed = form.others["add_lm_head"]
    once = _ONCE | (_POOLER if form.others["add_pooler"] else {}) | (head if headed else {})
    base = prefix if headed else ""
    return layer_rows(once, 1, base=base) | layer_rows(_LAYER, form.config.num_layers, base=base)


def _read_bert(given: ConfigJson, options: Options) -> Options:
    # In files of Google's multilingual and Chinese models: fields of the original program's pooler and attention.
    given.expect("directionality", "bidi")
    given.expect("pooler_type", "first_token_transform")
    given.skip("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
    return {**_read_encoder(given, options), "first_position": 0}


def _read_masked_bert(given: ConfigJson, options: Options) -> Options:
    return {**_read_bert(given, options), **_MASKED}


def _read_roberta(given: ConfigJson, options: Options) -> Options:
    # A token's position is the padding token's number and one for each token up to it that is no padding.
    padding, rows = given.optional("pad_token_id", int, 1), given.take("max_position_embeddings", int, 512)
    if padding is None or padding < 0:
        raise given.refused("pad_token_id", padding, "positions begin behind it, and it must be at least 0")
    length = rows - padding - 1
    if length < 1:
        raise given.refused(
            "max_position_embeddings",
            rows,
            f"positions begin with {padding + 1}, behind pad_token_id, and none is left",
        )
    positions = {"first_position": padding + 1, "max_sequence_length": length}
    return {**_read_encoder(given, options), **positions}


def _read_masked_roberta(given: ConfigJson, options: Options) -> Options:
    given.expect("hidden_act", "gelu")  # the head's, whatever the encoder has
    return {**_read_roberta(given, options), **_MASKED}


_MASKED = {"add_lm_head": True, "add_pooler": False}


def _read_encoder(given: ConfigJson, options: Options) -> Options:
    """Return the options with those that BERT and RoBERTa share."""
    activation = given.activation("hidden_act", "gelu", gated=False)
    given.expect("position_embedding_type", "absolute")
    given.expect("tie_word_embeddings", True)
    given.expect("is_decoder", False)
    given.expect("add_cross_attention", False)
    return {**options, "activation": activation, "add_lm_head": False, "add_pooler": True}


def _write_bert(options: Options) -> dict[str, Any]:
    return {"hidden_act": activation_name(options["activation"], gated=False), "tie_word_embeddings": True}


def _write_roberta(options: Options) -> dict[str, Any]:
    first = options["first_position"]
    rows = first + options["max_sequence_length"]
    return {**_write_bert(options), "pad_token_id": first - 1, "max_position_embeddings": rows}


def _options(model: Any) -> Options:
    types = model.tokentype_embedding
    return {
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.max_sequence_length,
        "first_position": model.first_position,
        "num_tokentypes": 0 if types is None else types.embedding.shape[0],
        "add_lm_head": model.head_dense is not None,
        "add_pooler": model.pooler is not None,
        "multipliers": model.multipliers,
    }


BERT = Architecture(
    model_type="bert",
    model=BertModel,
    fields={
        "vocab_size": ("vocab_size", 30522),
        "hidden_size": ("hidden_size", 768),
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_attention_heads", 12),
        "intermediate_size": ("ffn_hidden_size", 3072),
        "max_position_embeddings": ("max_sequence_length", 512),
        "type_vocab_size": ("num_tokentypes", 2),
        "layer_norm_eps": ("layernorm_epsilon", 1e-12),
        "hidden_dropout_prob": ("hidden_dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    },
    read=_read_bert,
    write=_write_bert,
    table=_bert_table,
    options=_options,
    base="",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={},
    ignored=r"embeddings\.position_ids",
    older=((r"\.LayerNorm\.gamma", ".LayerNorm.weight"), (r"\.LayerNorm\.beta", ".LayerNorm.bias")),
)
# Published files of this class also contain the pooler and the other pre-training head, which the class does not use.
MASKED_BERT = replace(
    BERT,
    read=_read_masked_bert,
    base="bert.",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=r"bert\.(embeddings\.position_ids|pooler\.dense\.(weight|bias))|cls\.seq_relationship\.(weight|bias)",
)
ROBERTA = replace(
    BERT,
    model_type="roberta",
    fields={
        **{name: field for name, field in BERT.fields.items() if name != "max_position_embeddings"},
        "vocab_size": ("vocab_size", 50265),
    },
    read=_read_roberta,
    write=_write_roberta,
    table=_roberta_table,
)
MASKED_ROBERTA = replace(
    ROBERTA,
    read=_read_masked_roberta,
    base="roberta.",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    ignored=r"roberta\.(embeddings\.position_ids|pooler\.dense\.(weight|bias))",
)
