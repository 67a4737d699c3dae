"""Kernels of a model's layers, from its configuration alone."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jax_te.config.activation import activation_parts
from jax_te.config.attention import LatentAttentionOptions
from jax_te.config.transformer import TransformerConfig


class KernelSize(NamedTuple):
    """Size of a kernel ``[k, n]`` of a transformer layer.

    Args:
        part: ``"attention"``: its projections. ``"shared"``: what else all tokens pass: the feed-forward block, or
            beside experts the projections to and from their latent, shared experts and their gate. ``"router"``: the
            experts' router. ``"expert"``: one of the kernels of each expert.
        k: number of input features.
        n: number of output features.
        components: number of parts of the output that the activation behind it takes. 0: none comes.
        adaptable: whether it has an adapter under ``--lora-rank``: not the kernel of a router, of a gate, of the
            projections to and from the experts' latent, nor that behind the cache of latent attention.
    """

    part: Literal["attention", "shared", "router", "expert"]
    k: int
    n: int
    components: int = 0
    adaptable: bool = True


class LayerKernels(NamedTuple):
    """Elements of the kernels of a transformer layer, without biases and norms.

    Args:
        attention: elements of attention's projections.
        shared: elements of what else all tokens pass, the router among them.
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
    elements = {"attention": 0, "shared": 0, "router": 0, "expert": 0}
    for kernel in kernel_sizes(config, layer):
        elements[kernel.part] += kernel.k * kernel.n
    experts = config.num_moe_experts if elements["expert"] else 0
    shared = elements["shared"] + elements["router"]
    return LayerKernels(elements["attention"], shared, elements["expert"], experts or 0)


def kernel_sizes(config: TransformerConfig, layer: int) -> list[KernelSize]:
    """Return the kernels of a layer, those of an expert once.

    Args:
        config: configuration of the layers.
        layer: number of the layer, from 0.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> [(kernel.k, kernel.n) for kernel in kernel_sizes(config, 0)]
    [(16, 48), (16, 16), (16, 64), (64, 16)]
    """
    latent, hidden = config.latent_attention, config.hidden_size
    kernels = _attention(config) if latent is None else _latent_attention(config, latent)
    if config.num_moe_experts is None or not config.has_experts(layer):
        return kernels + _block("shared", config, hidden, config.ffn_hidden_size or 0)
    width, shared_width = config.moe_latent_size, config.moe_shared_expert_intermediate_size
    kernels.append(KernelSize("router", hidden, config.num_moe_experts, adaptable=False))
    if width is not None:
        kernels += [KernelSize("shared", k, n, adaptable=False) for k, n in ((hidden, width), (width, hidden))]
    if shared_width is not None:
        kernels += _block("shared", config, hidden, shared_width)
        kernels += [KernelSize("shared", hidden, 1, adaptable=False)] if config.moe_shared_expert_gate else []
    return kernels + _block(
        "expert", config, width or hidden, config.moe_ffn_hidden_size or config.ffn_hidden_size or 0
    )


def layer_numbers(config: TransformerConfig, *, held: bool = False) -> list[int]:
    """Return the numbers of the layers that a token passes, also at the depths of multi-token prediction.

    The layer of a depth is like the last one. Each depth has a `depth_projection`, too: there are
    ``len(layer_numbers(config)) - config.num_layers``.

    Args:
        config: configuration of the layers.
        held: whether to return the layers that have parameters: of one that runs at all depths there is one.

    >>> sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    >>> config = TransformerConfig(**sizes, mtp_num_layers=3, mtp_use_repeated_layer=True)
    >>> layer_numbers(config), layer_numbers(config, held=True)
    ([0, 1, 1, 1, 1], [0, 1, 1])
    """
    depths = config.mtp_num_layers or 0
    if held and config.mtp_use_repeated_layer:
        depths = min(1, depths)
    return [*range(config.num_layers), *[config.num_layers - 1] * depths]


def depth_projection(config: TransformerConfig) -> int:
    """Return the elements of the kernel in front of the layer of a depth of multi-token prediction.

    >>> depth_projection(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2))  # 2 * 16²
    512
    """
    return 2 * config.hidden_size * config.hidden_size


def _block(part: Literal["shared", "expert"], config: TransformerConfig, hidden: int, width: int) -> list[KernelSize]:
    """Return the kernels of a feed-forward block: one for each component of the activation, side by side, and one
    back."""
    activation: Any = config.activation  # filled in by the configuration
    components = len(activation_parts(activation))
    return [KernelSize(part, hidden, components * width, components), KernelSize(part, width, hidden)]


def _attention(config: TransformerConfig) -> list[KernelSize]:
    # Filled in by the configuration itself where they were not given.
    channels, groups = config.kv_channels or 0, config.num_query_groups or 0
    queries = channels * config.num_attention_heads
    return [
        KernelSize("attention", config.hidden_size, queries + 2 * channels * groups),
        KernelSize("attention", queries, config.hidden_size),
    ]


def _latent_attention(config: TransformerConfig, latent: LatentAttentionOptions) -> list[KernelSize]:
    hidden, n, rank = config.hidden_size, config.num_attention_heads, latent.q_lora_rank
    queries, keys_and_values = n * latent.head_channels, n * (latent.qk_head_dim + latent.v_head_dim)
    to_queries = [(hidden, queries)] if rank is None else [(hidden, rank), (rank, queries)]
    to_latent = (hidden, latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    return [
        *(KernelSize("attention", *size) for size in (*to_queries, to_latent)),
        KernelSize("attention", latent.kv_lora_rank, keys_and_values, adaptable=False),
        KernelSize("attention", n * latent.v_head_dim, hidden),
    ]
