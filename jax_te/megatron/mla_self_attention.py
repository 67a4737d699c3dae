"""Megatron's self-attention block with multi-latent attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import CpCommType, MLATransformerConfig, TransformerConfig
from jax_te.layers import (
    KVCache,
    MultiLatentAttention,
    PackedSeqParams,
    Rotary,
    WindowKVCache,
    YarnScaling,
    rotary_embedding,
)
from jax_te.megatron.attention import TEDotProductAttention
from jax_te.megatron.enums import AttnMaskType
from jax_te.megatron.layernorm_linear import TELayerNormColumnParallelLinear
from jax_te.megatron.linear import TEColumnParallelLinear, TELinear
from jax_te.megatron.module import MegatronModule
from jax_te.megatron.self_attention import output_projection
from jax_te.ops import reorder_to_zigzag
from jax_te.sharding import axis_ranks
from jax_te.typing import Array


@checked
class MLASelfAttention(MultiLatentAttention, MegatronModule):
    """`jax_te.layers.MultiLatentAttention` composed of Megatron's layers, under Megatron's names.

    They are ``linear_q_down_proj`` and ``linear_q_up_proj`` (with ``q_lora_rank=None`` ``linear_q_proj`` alone),
    ``linear_kv_down_proj``, ``linear_kv_up_proj``, ``core_attention`` and ``linear_proj``. The norms of the latents are
    in the up-projections, ``linear_kv_up_proj.layer_norm_weight``, as in Megatron's specification with Transformer
    Engine; ``q_layernorm`` and ``kv_layernorm`` are None. The norm of the input is the layer's ``input_layernorm``.

    A call takes the arguments of `MultiheadAttention` and returns ``(output [b, s, h], None)``, since the bias is in
    the output.

    Args:
        config: sizes, norms, initializers and the options of the core: an `MLATransformerConfig`, or a
            `TransformerConfig` with ``latent_attention``.
        layer_number: number of the layer, from 1.
        attn_mask_type: an `AttnMaskType`, or its name.
        cp_comm_type: see `TEDotProductAttention`. None: ``"p2p"``.
        rngs: random streams, of which ``params`` draws the kernels.

    Without ``rotary_pos_emb`` a call rotates as an `MLATransformerConfig` says: by positions 0, 1, 2, … counted on from
    the cache, or those in each packed sequence. With another config it then rotates nothing.

    Raises:
        ValueError: for a config without latent attention; see also `TEDotProductAttention` and `TELinear`.

    Source: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention``. With ``q_lora_rank=None`` and
    ``qk_layernorm`` Megatron-Core 0.19 normalizes the input of ``linear_q_proj`` a second time; here, as in DeepSeek's
    models, it does not.

    >>> config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, kv_lora_rank=16)
    >>> attention = MLASelfAttention(config, rngs=nnx.Rngs(0))
    >>> output, bias = attention(jnp.ones((2, 8, 32)))
    >>> attention.state_dict()["linear_kv_down_proj.weight"].shape
    (80, 32)
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType | str = AttnMaskType.causal,
        cp_comm_type: CpCommType | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        latent = config.latent_attention
        if latent is None:
            raise ValueError(
                "jax_te.megatron.MLASelfAttention takes an MLATransformerConfig, or a TransformerConfig with "
                "latent_attention; SelfAttention is multi-head attention"
            )
        MegatronModule.__init__(self, config)
        # MultiLatentAttention's names of these options.
        self.attention_type, self.fuse_qkv_params = "self", False
        self.return_layernorm_output, self.layernorm = False, None
        self.q_norm = self.k_norm = None
        self.latent = latent
        core = TEDotProductAttention(
            config,
            layer_number,
            attn_mask_type,
            "self",
            k_channels=latent.head_channels,
            v_channels=latent.v_head_dim,
            cp_comm_type=cp_comm_type,
            # Training steps do not compute max logits; `jax_te.models.GPTModel.max_logits` asks for them in its calls.
            return_max_logit=False,
        )
        self.core_attention = core
        n, h = config.num_attention_heads, config.hidden_size

        def down(size: int, buffer: str) -> TELinear:
            return TELinear(
                h,
                size,
                parallel_mode="duplicated",
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                tp_comm_buffer_name=buffer,
                rngs=rngs,
            )

        def up(
            rank: int, channels: int, buffer: str, *, normalized: bool
        ) -> TEColumnParallelLinear | TELayerNormColumnParallelLinear:
            layer = TELayerNormColumnParallelLinear if normalized else TEColumnParallelLinear
            return layer(
                rank,
                n * channels,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=buffer,
                # Not "ffn", the default: heads and the feed-forward dimension may have different rules.
                kernel_axes=("fsdp", "heads"),
                rngs=rngs,
            )

        # The order of the lines below is that of MultiLatentAttention, so that the same ``rngs`` draw the same weights.
        rank, channels, norms = latent.q_lora_rank, latent.head_channels, latent.latent_layernorm
        if rank is None:
            self.linear_q_proj = up(h, channels, "q_proj", normalized=False)
        else:
            self.linear_q_down_proj = down(rank, "q_down_proj")
            self.linear_q_up_proj = up(rank, channels, "q_up_proj", normalized=norms)
        self.linear_kv_down_proj = down(latent.kv_lora_rank + latent.qk_pos_emb_head_dim, "kv_down_proj")
        of_values = latent.qk_head_dim + latent.v_head_dim
        self.linear_kv_up_proj = up(latent.kv_lora_rank, of_values, "kv_up_proj", normalized=norms)
        self.linear_proj = output_projection(config, n * latent.v_head_dim, rngs)
        self.q_layernorm = self.kv_layernorm = None

    # The names under which MultiLatentAttention and `clip_qk` know the layers.
    query = property(lambda self: self.linear_q_proj)
    q_down = property(lambda self: self.linear_q_down_proj)
    q_up = property(lambda self: self.linear_q_up_proj)
    kv_down = property(lambda self: self.linear_kv_down_proj)
    kv_up = property(lambda self: self.linear_kv_up_proj)
    proj = property(lambda self: self.linear_proj)

    def __call__(
        self,
        x: Array,
        attention_mask: Array | None = None,
        encoder_output: Array | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: Rotary | None = None,
        cache: KVCache | WindowKVCache | None = None,
        **others: Any,
    ) -> Any:
        """Return `MultiheadAttention`'s results, rotated as the config says unless ``rotary_pos_emb`` is given."""
        if x.ndim != 3:
            raise ValueError(f"MLASelfAttention takes x [b, s, h], got shape {x.shape}")
        if rotary_pos_emb is None and isinstance(self.config, MLATransformerConfig):
            positions = self._positions(x.shape[1], packed_seq_params, cache)
            rotary_pos_emb = rotary_embedding(positions, self.rotary_channels, **mla_rotary(self.config))
        return super().__call__(
            x,
            attention_mask,
            encoder_output,
            packed_seq_params=packed_seq_params,
            rotary_pos_emb=rotary_pos_emb,
            cache=cache,
            **others,
        )

    def _positions(self, s: int, packed: PackedSeqParams | None, cache: KVCache | WindowKVCache | None) -> Array:
        """Return the positions ``[s]`` or ``[b, s]`` of the tokens, in the order in which the core has them."""
        if cache is not None:
            return jnp.arange(s, dtype=jnp.int32) + cache.length
        positions = jnp.arange(s, dtype=jnp.int32) if packed is None else packed.positions(s)
        if not self.core_attention.context_parallel.cp_load_balanced or axis_ranks("sequence") == 1:
            return positions
        return reorder_to_zigzag(positions, axis=positions.ndim - 1)


def mla_rotary(config: MLATransformerConfig) -> dict[str, Any]:
    """Return the keywords of `jax_te.layers.rotary_embedding` by which a configuration's heads are rotated.

    >>> config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, rope_type="rope")
    >>> mla_rotary(config)
    {'base': 10000.0, 'rotary_percent': 1.0, 'interleaved': True, 'scaling': None}
    """
    options: dict[str, Any] = {"base": float(config.rotary_base), "rotary_percent": 1.0, "interleaved": True}
    if config.rope_type == "rope":
        return options | {"rotary_percent": config.rotary_percent, "scaling": None}
    scaling = YarnScaling(
        factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
    )
    return options | {"scaling": scaling}
