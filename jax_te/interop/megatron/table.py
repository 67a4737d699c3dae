"""Megatron-Core's tensors of a GPT model, and their layouts in our parameters."""

from __future__ import annotations

from jax_te.config import TransformerConfig
from jax_te.interop.megatron.experts import expert_rows
from jax_te.interop.tables import TIED, Form, Table, layer_rows, rows_of_layer

_MLP, _ATTENTION = "layers/{i}/layernorm_mlp", "layers/{i}/self_attention"
_QKV, _PROJ = "decoder.layers.{i}.self_attention.linear_qkv.", "decoder.layers.{i}.self_attention.linear_proj."
_FC1, _FC2 = "decoder.layers.{i}.mlp.linear_fc1.", "decoder.layers.{i}.mlp.linear_fc2."
_LAYER: Table = {
    f"{_ATTENTION}/qkv/scale": {f"{_QKV}layer_norm_weight": "h -> h"},
    f"{_ATTENTION}/qkv/kernel": {f"{_QKV}weight": "(g c d) h -> h c (g d)"},
    f"{_ATTENTION}/proj/kernel": {f"{_PROJ}weight": "h q -> q h"},
    f"{_MLP}/scale": {f"{_FC1}layer_norm_weight": "h -> h"},
    f"{_MLP}/wi_kernel": {f"{_FC1}weight": "(a f) h -> h a f"},
    f"{_MLP}/wo_kernel": {f"{_FC2}weight": "h f -> f h"},
}
_QKV_BIAS: Table = {f"{_ATTENTION}/qkv/bias": {f"{_QKV}bias": "(g c d) -> c (g d)"}}
_BIASES: Table = {
    f"{_ATTENTION}/proj/bias": {f"{_PROJ}bias": "h -> h"},
    f"{_MLP}/wi_bias": {f"{_FC1}bias": "(a f) -> a f"},
    f"{_MLP}/wo_bias": {f"{_FC2}bias": "h -> h"},
}
_NORM_BIASES: Table = {
    f"{_ATTENTION}/qkv/ln_bias": {f"{_QKV}layer_norm_bias": "h -> h"},
    f"{_MLP}/ln_bias": {f"{_FC1}layer_norm_bias": "h -> h"},
}


def megatron_table(form: Form) -> Table:
    """Return Megatron-Core's tensors of a model of this form."""
    config, layer = form.config, dict(_LAYER)
    # RMSNorm has no biases.
    centered = config.normalization == "LayerNorm"
    layer |= (_BIASES if config.add_bias_linear else {}) | (_NORM_BIASES if centered else {})
    layer |= _QKV_BIAS if config.add_bias_linear or config.add_qkv_bias else {}
    ends = {"scale": "weight", "bias": "bias"} if centered else {"scale": "weight"}
    for head in ("q", "k") if config.qk_layernorm else ():
        norm = f"decoder.layers.{{i}}.self_attention.{head}_layernorm"
        layer |= {f"{_ATTENTION}/{head}_norm/{ours}": {f"{norm}.{theirs}": "d -> d"} for ours, theirs in ends.items()}
    learned = form.others["position_embedding_type"] == "learned_absolute"
    positions = {"position_embedding/embedding": {"embedding.position_embeddings.weight": "s h -> s h"}}
    return {
        "embedding/embedding": {"embedding.word_embeddings.weight": "v h -> v h"},
        **(positions if learned else {}),
        **_layers(layer, config),
        **{f"final_norm/{ours}": {f"decoder.final_layernorm.{theirs}": "h -> h"} for ours, theirs in ends.items()},
        **({} if form.others[TIED] else {"output_kernel": {"output_layer.weight": "v h -> h v"}}),
    }


def _layers(dense: Table, config: TransformerConfig) -> Table:
    """Return the rows of all layers: those of ``dense``, or of experts in place of its feed-forward block."""
    if config.num_moe_experts is None:
        return layer_rows(dense, config.num_layers)
    mixture = {path: row for path, row in dense.items() if not path.startswith(_MLP)} | expert_rows(config)
    rows: Table = {}
    for number in range(config.num_layers):
        rows |= rows_of_layer(mixture if config.has_experts(number) else dense, number)
    return rows
