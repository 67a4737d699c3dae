"""Megatron's self-attention block."""

from __future__ import annotations

from typing import ClassVar

from flax import nnx

from jax_te._validation import checked
from jax_te.config import CpCommType, TransformerConfig
from jax_te.layers import MultiheadAttention
from jax_te.megatron.attention import TEDotProductAttention
from jax_te.megatron.enums import AttnMaskType
from jax_te.megatron.layernorm_linear import TELayerNormColumnParallelLinear
from jax_te.megatron.linear import TERowParallelLinear
from jax_te.megatron.module import MegatronModule, check_input_norms
from jax_te.megatron.norm import TENorm
from jax_te.sharding import row_axis


@checked
class SelfAttention(MultiheadAttention, MegatronModule):
    """`jax_te.layers.MultiheadAttention` composed of Megatron's layers, under Megatron's names.

    They are ``linear_qkv``, with the norm in front, ``core_attention``, ``linear_proj``, and with
    ``config.qk_layernorm`` ``q_layernorm`` and ``k_layernorm``. The kernel of ``linear_qkv`` is ``[h, r + 2, g · d]``;
    in a `state_dict` it has Megatron's order, ``[g · (r + 2) · d, h]``.

    A call takes the arguments of `MultiheadAttention` and returns ``(output [b, s, h], None)``, since the bias is in
    the output.

    Args:
        config: sizes, norms, initializers and the options of the core.
        layer_number: number of the layer, from 1.
        attn_mask_type: an `AttnMaskType`, or its name.
        cp_comm_type: see `TEDotProductAttention`. None: ``"p2p"``.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: see `TEDotProductAttention` and `TELinear`.

    Source: ``megatron.core.transformer.attention.SelfAttention``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    >>> attention = SelfAttention(config, rngs=nnx.Rngs(0))
    >>> output, bias = attention(jnp.ones((2, 8, 32)))
    >>> attention.linear_qkv.kernel.shape, attention.state_dict()["linear_qkv.weight"].shape
    ((32, 4, 16), (64, 32))
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
        if config.latent_attention is not None:
            raise ValueError(
                "jax_te.megatron.SelfAttention is multi-head attention, and the config has latent_attention; "
                "take jax_te.megatron.MLASelfAttention"
            )
        MegatronModule.__init__(self, config)
        check_input_norms(config)
        # MultiheadAttention's names of these options.
        self.attention_type = "self"
        self.return_layernorm_output, self.fuse_qkv_params, self.qk_norm_before_rope = False, True, True
        self.layernorm = None
        core = TEDotProductAttention(
            config,
            layer_number,
            attn_mask_type,
            "self",
            cp_comm_type=cp_comm_type,
            # Training steps do not compute max logits; `jax_te.models.GPTModel.max_logits` asks for them in its calls.
            return_max_logit=False,
        )
        self.core_attention = core
        n, g, d, h = core.num_attention_heads, core.num_gqa_groups, core.kv_channels, config.hidden_size
        self.qk_norm_across_heads = config.qk_layernorm_across_heads
        heads = (n, g) if self.qk_norm_across_heads else (1, 1)
        # Biases are added by the layers, at the end of their GEMMs, at no cost; so ``skip_bias_add`` is not used.
        self.linear_qkv = TELayerNormColumnParallelLinear(
            h,
            (n // g + 2, g * d),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            # Not "ffn", the default: heads and the feed-forward dimension may have different rules.
            kernel_axes=("fsdp", "components", "heads"),
            rngs=rngs,
        )
        self.q_layernorm, self.k_layernorm = (
            TENorm(config, count * d, config.layernorm_epsilon) if config.qk_layernorm else None for count in heads
        )
        self.linear_proj = output_projection(config, n * d, rngs)

    grouped_projections: ClassVar[tuple[str, ...]] = ("linear_qkv",)

    # The names under which MultiheadAttention and `clip_qk` know the layers.
    qkv = property(lambda self: self.linear_qkv)
    proj = property(lambda self: self.linear_proj)
    q_norm = property(lambda self: self.q_layernorm)
    k_norm = property(lambda self: self.k_layernorm)


def output_projection(config: TransformerConfig, channels: int, rngs: nnx.Rngs) -> TERowParallelLinear:
    """Return the layer behind the heads, which together have ``channels``, of any form of self-attention."""
    return TERowParallelLinear(
        channels,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=config.add_bias_linear,
        input_is_parallel=True,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name="proj",
        kernel_axes=(row_axis("heads"), None),
        rngs=rngs,
    )
