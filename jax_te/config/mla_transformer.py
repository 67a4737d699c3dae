"""Configuration of a stack of transformer layers with multi-latent attention, in Megatron-Core's fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from jax_te._validation import check_annotations, check_bool, log_hints
from jax_te.config.attention import LatentAttentionOptions
from jax_te.config.megatron_fields import accepts_megatron_fields
from jax_te.config.refined import ROTATIONS, check_refined_fields
from jax_te.config.transformer import TransformerConfig


@accepts_megatron_fields
@dataclass(frozen=True, kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """`TransformerConfig` with Megatron-Core's fields of multi-latent attention, and of its rotation by position.

    The fields ``latent_attention`` and ``softmax_scale`` follow from the others and cannot be given. Models rotate as
    these fields say, whatever their own position embedding is, and so does a `jax_te.megatron.MLASelfAttention`.

    Args:
        multi_latent_attention: option that must be True; `TransformerConfig` is for multi-head attention.
        q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim: see `LatentAttentionOptions`.
        qk_layernorm: whether to normalize both latents.
        rope_type: ``"yarn"``, or ``"rope"``, which scales no frequency.
        rotary_base: base of the wavelengths, see `jax_te.layers.rotary_embedding`.
        rotary_percent: fraction of the rotated part that ``"rope"`` rotates.
        rotary_scaling_factor, original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim: options
            of `jax_te.layers.YarnScaling`. The first and the last scale the scores under ``"rope"``, too, as in
            Megatron.
        cache_mla_latents: option without effect: a cache always holds latents.
        mla_down_proj_fusion: option that must be False: the projections to the latents are separate layers.

    The other fields are those of `TransformerConfig`; ``normalization`` is ``"RMSNorm"`` by default.

    Raises:
        ValueError: for an unknown ``rope_type`` and another value of a field that has only one; see also
            `TransformerConfig` and `LatentAttentionOptions`.
        TypeError: for ``latent_attention`` and ``softmax_scale``; see also `TransformerConfig`.

    Source: ``megatron.core.transformer.MLATransformerConfig``.

    >>> config = MLATransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, mscale_all_dim=1.0)
    >>> config.latent_attention.kv_lora_rank, round(config.softmax_scale, 4)
    (512, 0.1352)
    """

    latent_attention: LatentAttentionOptions | None = field(init=False, default=None)
    softmax_scale: float | None = field(init=False, default=None)
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: Literal["rope", "yarn"] = "yarn"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    cache_mla_latents: bool = False
    mla_down_proj_fusion: bool = False

    # qk_layernorm is the latents' here.
    _for_heads: ClassVar[tuple[str, ...]] = ("num_query_groups", "add_qkv_bias", "qk_layernorm_across_heads")

    def __post_init__(self) -> None:
        # Before the other fields, which are partly filled in.
        own = [
            each.name for each in fields(self) if each.name not in {known.name for known in fields(TransformerConfig)}
        ]
        check_annotations(self, MLATransformerConfig, own)
        check_bool(qk_layernorm=self.qk_layernorm)
        if not self.multi_latent_attention:
            raise ValueError("multi_latent_attention=False is multi-head attention: take TransformerConfig")
        if self.mla_down_proj_fusion:
            raise ValueError(
                "mla_down_proj_fusion=True is not supported: the projections to the latents are separate layers with "
                "one norm in front. Leave it out"
            )
        log_hints(cache_mla_latents=self.cache_mla_latents)
        sizes = LatentAttentionOptions(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_head_dim=self.qk_head_dim,
            qk_pos_emb_head_dim=self.qk_pos_emb_head_dim,
            v_head_dim=self.v_head_dim,
            latent_layernorm=self.qk_layernorm,
        )
        object.__setattr__(self, "latent_attention", sizes)
        object.__setattr__(self, "softmax_scale", self._score_factor() / math.sqrt(sizes.head_channels))
        super().__post_init__()
        check_refined_fields(self, ROTATIONS)

    def _score_factor(self) -> float:
        # As Megatron, which reads both fields under "rope", too.
        factor = max(self.rotary_scaling_factor, 1.0)
        amplitude = 0.1 * self.mscale_all_dim * math.log(factor) + 1.0
        if not math.isfinite(amplitude * amplitude) or amplitude == 0.0:
            raise ValueError(
                f"mscale_all_dim={self.mscale_all_dim!r} gives scores the factor {amplitude} squared, which must be "
                "finite and not 0"
            )
        return amplitude * amplitude
