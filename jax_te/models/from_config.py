"""Construction of layers from a configuration, and checks for fields that the models do not support."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Literal

from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import (
    LayerNorm,
    RMSNorm,
    TransformerLayer,
    check_context_size,
    check_expert_size,
    keep_in_high_precision,
    make_norm,
    precision_while_building,
)
from jax_te.megatron import attention_options, recipe_from_config
from jax_te.ops import MaskType
from jax_te.recipe import current_recipe

_NOT_FOLLOWED = {
    "perform_initialization": "; nnx.eval_shape gives a model without arrays",
    "moe_enable_routing_replay": "; MegatronGPTModel does",
    "delay_wgrad_compute": "; jax_te.training.deferred_vjp computes weight gradients apart",
    "disable_parameter_transpose_cache": "; kernels are kept between microbatches only where a call asks for it",
    "quant_recipe": "; jax_te.megatron.apply_quantization_config(model, config.quant_recipe) does",
}

ENCODER_NOT_FOLLOWED = {
    "qk_clip": "; GPTModel does",
    "log_max_attention_logit": "; GPTModel does",
    "num_moe_experts": "; GPTModel and MegatronGPTModel do",
    "latent_attention": "; GPTModel and MegatronGPTModel do",
    "mtp_num_layers": "; GPTModel and MegatronGPTModel do",
    "block_input_layernorm": "; GPTModel does",
    "parallel_attention_mlp": "; GPTModel and MegatronGPTModel do",
    "cp_load_balanced": ": zig-zag order shares out the work of a causal mask, and an encoder has none (T5's relative "
    "positions are of natural order, too)",
}
"""Fields that models with an encoder do not support."""


@checked
def transformer_layer(
    config: TransformerConfig,
    number: int = 0,
    *,
    layer_type: Literal["encoder", "decoder"] = "encoder",
    self_attn_mask_type: MaskType = "causal",
    post_norm: bool = False,
    rngs: nnx.Rngs,
) -> TransformerLayer:
    """Return layer ``number`` of a stack that ``config`` describes.

    Some fields of the configuration depend on the number: the first and last layers may stay in high precision
    (``first_last_layers_bf16``), some layers may have experts (``moe_layer_freq``), some may attend in a window
    (``window_attn_skip_freq``), and each may exchange keys in a different way (``cp_comm_type``).

    Args:
        config: configuration of the stack.
        number: index of the layer, from 0.
        layer_type, self_attn_mask_type: see `TransformerLayer`.
        post_norm: whether the norms are behind the residual sums, as in BERT, in place of in front of the blocks.
        rngs: random streams, of which ``params`` draws all weights.

    >>> config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    >>> transformer_layer(config, rngs=nnx.Rngs(0)).hidden_size
    32
    """
    if not 0 <= number < config.num_layers:
        raise ValueError(f"number must be that of one of the config's {config.num_layers} layers, from 0, got {number}")
    forced = config.moe_router_force_load_balancing or config.moe_router_force_biased is not None
    with precision_while_building(config, number):
        layer = TransformerLayer(
            config.hidden_size,
            config.ffn_hidden_size,  # type: ignore[arg-type]  # the config has filled it in
            config.num_attention_heads,
            **attention_options(config, number),
            hidden_dropout=config.hidden_dropout,
            # Norms behind the sums: self-attention has no norm in front, the feed-forward block's is behind the first
            # sum, and its output is where the second sum begins, behind which is the layer's own.
            apply_residual_connection_post_layernorm=post_norm,
            output_layernorm=post_norm,
            block_output_layernorm=config.block_output_layernorm,
            block_input_layernorm=config.block_input_layernorm,
            parallel_attention_mlp=config.parallel_attention_mlp,
            layer_type=layer_type,
            self_attn_mask_type=self_attn_mask_type,
            window_size=config.window_size if config.has_window(number) else None,
            qkv_bias=config.add_qkv_bias,
            latent=config.latent_attention,
            activation=config.limited_activation,
            experts=config.moe_options() if config.has_experts(number) else None,
            # Only random choices read it, and layers that differ in a number are not alike for `run_layers`.
            layer_number=number + 1 if forced and config.has_experts(number) else None,
            rngs=rngs,
        )
    if config.in_high_precision(number):
        keep_in_high_precision(layer)
    return layer


def norm_of(config: TransformerConfig, *, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
    """Return a norm of hidden states ``[b, s, h]`` as ``config`` describes it.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, normalization="RMSNorm")
    >>> type(norm_of(config, rngs=nnx.Rngs(0))).__name__
    'RMSNorm'
    """
    return make_norm(
        config.normalization,
        config.hidden_size,
        config.layernorm_epsilon,
        sequence_parallel=config.sequence_parallel,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        params_dtype=config.params_dtype,
        rngs=rngs,
    )


def check_mesh_sizes(config: TransformerConfig) -> None:
    """Raise ValueError for a ``context_parallel_size``, and of experts an ``expert_model_parallel_size``, other than 1
    and that of the mesh in use, if any.

    Layers themselves compare the size of the tensor axis.

    >>> check_mesh_sizes(TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2))
    """
    check_context_size(config.context_parallel_size)
    if config.num_moe_experts is not None:
        check_expert_size(config.expert_model_parallel_size)


def check_config(
    config: TransformerConfig, *, also: Mapping[str, str] | None = None, follows: Collection[str] = ()
) -> None:
    """Raise ValueError for a field that the models do not support, unless the field has its default.

    ``fp8`` and ``fp4`` are followed if the model is built inside of ``autocast(recipe_from_config(config))``, and
    refused otherwise. The sizes that `check_mesh_sizes` names must be those of the mesh in use.

    Args:
        config: configuration of the model.
        also: extra unsupported fields: name → hint appended to the error message.
        follows: fields that this model follows, unlike the others.

    >>> check_config(TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2))
    """
    check_mesh_sizes(config)
    hints = {name: hint for name, hint in {**_NOT_FOLLOWED, **(also or {})}.items() if name not in follows}
    if "cuda_graph_impl" not in follows and config.cuda_graph_impl in ("local", "transformer_engine"):
        raise ValueError(
            f"the models do not follow cuda_graph_impl={config.cuda_graph_impl!r}; under jax.jit a model or a train "
            "step is one program, which cuda_graph_impl='full_iteration' says"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in hints and value != field.default:
            who = "the models do" if field.name in _NOT_FOLLOWED else "this model does"
            raise ValueError(f"{who} not follow {field.name}={value!r}{hints[field.name]}; leave it out of its config")
    recipe = recipe_from_config(config)
    # Quantizer states are made at construction, so the caller's context must be there before the model's layers are.
    if recipe is not None and current_recipe() != recipe:
        raise ValueError(
            f"the config asks for the recipe {recipe.name!r}: build and call the model inside of "
            "autocast(recipe_from_config(config)), see jax_te.megatron"
        )
