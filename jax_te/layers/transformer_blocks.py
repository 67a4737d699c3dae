"""Blocks of a transformer layer, made from its options, and the arrangements of blocks and norms that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from flax import nnx

from jax_te.config import LatentAttentionOptions, MoEOptions
from jax_te.layers.attention.multi_latent_attention import MultiLatentAttention
from jax_te.layers.attention.multihead_attention import MultiheadAttention
from jax_te.layers.keywords import CrossAttentionOptions, LayerNormMLPKeywords, SelfAttentionOptions
from jax_te.layers.moe.mixture import MoE

NOT_OF_LATENT_ATTENTION: dict[str, Any] = {
    "num_gqa_groups": None,
    "kv_channels": None,
    "qk_norm_type": None,
    "qk_norm_before_rope": False,
    "qk_norm_across_heads": False,
    "qkv_bias": False,
    "fuse_qkv_params": True,
}
"""Keywords that `MultiheadAttention` has and `MultiLatentAttention` does not, with their defaults."""

NOT_OF_EXPERTS = (
    "normalization",
    "zero_centered_gamma",
    "input_layernorm",
    "return_layernorm_output",
    "set_parallel_mode",
    "fuse_wgrad_accumulation",
)
"""Keywords of `LayerNormMLP` that `MoE` has not: the norm is a layer in front of it, `MoEOptions` say how experts are
split, and XLA fuses sums of gradients in any case."""


def make_self_attention(
    h: int, n: int, latent: LatentAttentionOptions | None, *, rngs: nnx.Rngs, **options: Unpack[SelfAttentionOptions]
) -> MultiheadAttention:
    """Return the self-attention of a layer with hidden size ``h`` and ``n`` heads.

    Raises:
        ValueError: for an option that latent attention does not have, unless it has its default.
    """
    if latent is None:
        return MultiheadAttention(h, n, **options, rngs=rngs)
    given: dict[str, Any] = dict(options)
    for name, default in NOT_OF_LATENT_ATTENTION.items():
        value = given.pop(name, default)
        if value != default:
            raise ValueError(
                f"{name}={value!r} does not go with latent attention, whose heads have the sizes and norms of "
                "LatentAttentionOptions; leave it out"
            )
    return MultiLatentAttention(h, n, latent, **given, rngs=rngs)


def make_cross_attention(
    h: int, n: int, *, rngs: nnx.Rngs, **options: Unpack[CrossAttentionOptions]
) -> MultiheadAttention:
    """Return the cross-attention of a decoder layer with hidden size ``h`` and ``n`` heads."""
    return MultiheadAttention(h, n, **options, attention_type="cross", rngs=rngs)


def make_experts(
    h: int, f: int, experts: MoEOptions, layer_number: int | None, options: LayerNormMLPKeywords, rngs: nnx.Rngs
) -> MoE:
    """Return the mixture of experts of a layer with hidden size ``h``.

    Args:
        h: hidden size.
        f: feed-forward size of experts that have none of their own.
        experts: options of experts and router.
        layer_number: the layer's number, which random choices of the router depend on.
        options: options of the feed-forward block that the experts replace, see `NOT_OF_EXPERTS`.
        rngs: source of the kernels' keys.
    """
    shared: dict[str, Any] = {name: option for name, option in options.items() if name not in NOT_OF_EXPERTS}
    return MoE(
        h,
        f if experts.ffn_hidden_size is None else experts.ffn_hidden_size,
        experts.router,
        **shared,
        apply_probs_on_input=experts.apply_probs_on_input,
        latent_size=experts.latent_size,
        shared_expert_intermediate_size=experts.shared_expert_intermediate_size,
        shared_expert_gate=experts.shared_expert_gate,
        dispatch=experts.dispatch,
        expert_tensor_parallel=experts.expert_tensor_parallel,
        layer_number=layer_number,
        rngs=rngs,
    )


def check_arrangement(
    *,
    layer_type: str,
    apply_residual_connection_post_layernorm: bool,
    output_layernorm: bool,
    parallel_attention_mlp: bool,
    block_input_layernorm: bool,
    experts: MoEOptions | None,
    latent: LatentAttentionOptions | None,
    set_parallel_mode: bool,
) -> None:
    """Raise ValueError for arrangements of norms and blocks that do not go together."""
    decodes = layer_type == "decoder"
    moved_norms = {
        "apply_residual_connection_post_layernorm=True": apply_residual_connection_post_layernorm,
        "output_layernorm=True": output_layernorm,
    }
    if parallel_attention_mlp:
        others = {**moved_norms, "layer_type='decoder'": decodes}
        _refuse_with("parallel_attention_mlp=True", others, ", which is for blocks one after the other")
    if not block_input_layernorm:
        _refuse_with("block_input_layernorm=False", {**moved_norms, "experts": experts is not None})
    if experts is not None and experts.expert_tensor_parallel and not set_parallel_mode:
        raise ValueError(
            "set_parallel_mode=False does not reach experts; give MoEOptions(expert_tensor_parallel=False), too"
        )
    if latent is not None and decodes:
        raise ValueError(
            "latent attention is self-attention alone, and layer_type='decoder' has cross-attention, too; leave one out"
        )


def _refuse_with(option: str, others: Mapping[str, bool], why: str = "") -> None:
    """Raise ValueError for the first of the other options that is given.

    Args:
        option: option that is given, as in a call.
        others: options that do not go with it -> whether they are given.
        why: reason, as a clause about the other option.
    """
    for other, is_given in others.items():
        if is_given:
            raise ValueError(f"{option} does not go with {other}{why}; leave one out")
