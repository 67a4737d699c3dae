"""Transformer layers from a configuration."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import TransformerLayer, keep_in_high_precision
from jax_te.megatron import is_layer_window_attention
from jax_te.recipe import autocast


def transformer_layer(
    config: TransformerConfig,
    number: int = 0,
    *,
    layer_type: str = "encoder",
    self_attn_mask_type: str = "causal",
    rngs: nnx.Rngs,
) -> TransformerLayer:
    """Layer ``number``, from 0, of ``config``.

    One of the first and last layers may be kept in high precision, see ``first_last_layers_bf16``, some may attend in a
    window, see ``window_attn_skip_freq``, and exchange keys in a way of their own, see ``cp_comm_type``.

    >>> config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    >>> transformer_layer(config, rngs=nnx.Rngs(0)).hidden_size
    32
    """
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number + 1)
    ffn: Any = config.ffn_hidden_size  # the config has filled it in
    kinds = config.cp_comm_type
    kind = kinds[number] if isinstance(kinds, tuple) else kinds
    build = functools.partial(
        TransformerLayer,
        config.hidden_size,
        ffn,
        config.num_attention_heads,
        layernorm_epsilon=config.layernorm_epsilon,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method=config.init_method,
        output_layer_init_method=config.output_layer_init_method,
        layer_type=layer_type,
        kv_channels=config.kv_channels,
        self_attn_mask_type=self_attn_mask_type,
        window_size=config.window_size if windowed else None,
        softmax_scale=config.softmax_scale,
        softmax_type=config.softmax_type,
        cp_comm_type="p2p" if kind is None else kind,
        hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes,
        cp_load_balanced=config.cp_load_balanced,
        qk_norm_type=config.normalization if config.qk_layernorm else None,
        qk_norm_before_rope=True,
        tp_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        num_gqa_groups=config.num_query_groups,
        normalization=config.normalization,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        activation=config.activation,
        bias=config.add_bias_linear,
        params_dtype=config.params_dtype,
        rngs=rngs,
    )
    if not config.in_high_precision(number):
        return build()
    with autocast(None):
        layer = build()
        keep_in_high_precision(layer)
        return layer
