"""Elements of the kernels of a model's layers, from its configuration alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_te.config.activation import activation_parts
from jax_te.config.attention import LatentAttentionOptions
from jax_te.config.transformer import TransformerConfig


class LayerKernels(NamedTuple):
    """Elements of the kernels of a transformer layer, without biases and norms.

    Args:
        attention: elements of attention's projections.
        shared: elements of the feed-forward block, or beside experts of what all tokens pass: the router, the
            projections to and from the experts' latent, shared experts and their gate.
        expert: elements of one expert; 0 in a layer without.
        experts: number of experts.
    """

    attention: int
    shared: int
    expert: int = 0
    experts: int = 0


def layer_kernels(config: TransformerConfig, layer: int) -> LayerKernels:
    """Return the elements of the kernels of a layer.

    Args:
        config: configuration of the layers.
        layer: number of the layer, from 0.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> layer_kernels(config, 0)  # 4 * 16² and 8 * 16²
    LayerKernels(attention=1024, shared=2048, expert=0, experts=0)
    """
    latent = config.latent_attention
    attention = _attention(config) if latent is None else _latent_attention(config, latent)
    activation: Any = config.activation  # filled in by the configuration
    # A kernel for each component of the activation, and the one back.
    matrices = len(activation_parts(activation)) + 1
    hidden = config.hidden_size
    if config.num_moe_experts is None or not config.has_experts(layer):
        return LayerKernels(attention, matrices * hidden * (config.ffn_hidden_size or 0))
    width, shared_width = config.moe_latent_size, config.moe_shared_expert_intermediate_size
    router = hidden * config.num_moe_experts
    shared = matrices * hidden * (shared_width or 0)
    gate = hidden if config.moe_shared_expert_gate and shared_width is not None else 0
    projections = 2 * hidden * (width or 0)
    expert = matrices * (width or hidden) * (config.moe_ffn_hidden_size or config.ffn_hidden_size or 0)
    return LayerKernels(attention, router + projections + shared + gate, expert, config.num_moe_experts)


def depth_projection(config: TransformerConfig) -> int:
    """Return the elements of the kernel in front of the layer of a depth of multi-token prediction.

    >>> depth_projection(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2))  # 2 * 16²
    512
    """
    return 2 * config.hidden_size * config.hidden_size


def _attention(config: TransformerConfig) -> int:
    # Filled in by the configuration itself where they were not given.
    channels, groups = config.kv_channels or 0, config.num_query_groups or 0
    return 2 * config.hidden_size * channels * (config.num_attention_heads + groups)


def _latent_attention(config: TransformerConfig, latent: LatentAttentionOptions) -> int:
    hidden, n, rank = config.hidden_size, config.num_attention_heads, latent.q_lora_rank
    queries = n * latent.head_channels
    to_queries = hidden * queries if rank is None else (hidden + queries) * rank
    to_latent = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    from_latent = latent.kv_lora_rank * n * (latent.qk_head_dim + latent.v_head_dim)
    return to_queries + to_latent + from_latent + n * latent.v_head_dim * hidden
