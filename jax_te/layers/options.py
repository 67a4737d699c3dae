"""Groups of arguments that a layer passes to the layers inside of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax_te.config import CpCommType
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.norm import Normalization
from jax_te.ops import BiasType, MaskType, SoftmaxType, Window
from jax_te.typing import Array, DTypeLike, Initializer, TensorGroup


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of `MultiheadAttention`, one field for each keyword of its constructor except ``rngs``.

    No field has a default: code that builds a group gives each option, and type checkers report a missing one.
    `keywords` gives them to the constructor, of a subclass as well::

        MultiheadAttention(hidden_size, num_attention_heads, **options.keywords(), rngs=rngs)
    """

    num_gqa_groups: int | None
    kv_channels: int | None
    attention_dropout: float
    layernorm_epsilon: float
    normalization: Normalization
    zero_centered_gamma: bool
    input_layernorm: bool
    return_layernorm_output: bool
    attention_type: Literal["self", "cross"]
    attn_mask_type: MaskType
    window_size: Window | None
    softmax_scale: float | None
    softmax_type: SoftmaxType
    logit_softcap: float | None
    return_max_logit: bool
    num_splits: int | None
    cp_comm_type: CpCommType
    hierarchical_context_parallel_sizes: tuple[int, int] | None
    cp_load_balanced: bool
    qk_norm_type: Normalization | None
    qk_norm_before_rope: bool
    qk_norm_across_heads: bool
    qkv_bias: bool
    fuse_qkv_params: bool
    set_parallel_mode: bool
    sequence_parallel: bool
    tp_group: TensorGroup
    tp_size: int
    fuse_wgrad_accumulation: bool
    return_bias: bool
    bias: bool
    init_method: Initializer | None
    output_layer_init_method: Initializer | None
    params_dtype: DTypeLike

    def keywords(self) -> dict[str, Any]:
        """Return the options as keywords of the constructor."""
        return dict(vars(self))

    def latent_keywords(self) -> dict[str, Any]:
        """Return the options as keywords of `MultiLatentAttention`.

        Raises:
            ValueError: for an option that it does not have.
        """
        given = self.keywords()
        for name, default in _NOT_LATENT.items():
            value = given.pop(name)
            if value != default:
                raise ValueError(
                    f"{name}={value!r} does not go with latent attention, whose heads have the sizes and norms of "
                    "LatentAttentionOptions; leave it out"
                )
        return given


_NOT_LATENT = {
    "num_gqa_groups": None,
    "kv_channels": None,
    "attention_type": "self",
    "qk_norm_type": None,
    "qk_norm_before_rope": False,
    "qk_norm_across_heads": False,
    "qkv_bias": False,
    "fuse_qkv_params": True,
}
"""Options of `MultiheadAttention` alone -> their defaults."""


class CoreCall(NamedTuple):
    """Arguments of one call of `DotProductAttention`, apart from queries, keys and values."""

    attention_mask: Array | None
    q_lengths: Array | None
    kv_lengths: Array | None
    packed_seq_params: PackedSeqParams | None
    core_attention_bias_type: BiasType
    core_attention_bias: Array | None
    alibi_slopes: Array | None
    dropout_key: Array | None
    attn_mask_type: MaskType
    window_size: Window | None
    checkpoint_core_attention: bool
    return_max_logit: bool
