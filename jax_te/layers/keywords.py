"""Keywords of the layers' constructors and calls, as types of ``**options`` that another class hands on to a layer."""

from __future__ import annotations

from typing import Literal, TypedDict

from flax import nnx

from jax_te.config import ActivationLike, ActivationParams, CpCommType, LatentAttentionOptions, MoEOptions
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.norm import Normalization
from jax_te.ops import BiasType, MaskType, SoftmaxType, Window
from jax_te.typing import Array, DTypeLike, Initializer, Key, LogicalAxes, ParallelMode, TensorGroup


class ParallelKeywords(TypedDict, total=False):
    """Keywords that the linear layers of one block have in common, whatever they compute."""

    sequence_parallel: bool
    tp_group: TensorGroup
    tp_size: int
    fuse_wgrad_accumulation: bool
    params_dtype: DTypeLike


class _KernelKeywords(ParallelKeywords, total=False):
    """Keywords of every layer with kernels."""

    bias: bool
    init_method: Initializer | None


class LinearKeywords(_KernelKeywords, total=False):
    """Keywords of `Linear`."""

    parallel_mode: ParallelMode
    skip_weight_param_allocation: bool
    return_bias: bool
    kernel_axes: LogicalAxes | None
    out_axes: LogicalAxes | None


class LayerNormLinearKeywords(LinearKeywords, total=False):
    """Keywords of `LayerNormLinear`."""

    normalization: Normalization
    zero_centered_gamma: bool
    return_layernorm_output: bool


class LayerNormMLPKeywords(_KernelKeywords, total=False):
    """Keywords of `LayerNormMLP`."""

    activation: ActivationLike
    activation_params: ActivationParams | None
    normalization: Normalization
    zero_centered_gamma: bool
    input_layernorm: bool
    output_layer_init_method: Initializer | None
    return_layernorm_output: bool
    set_parallel_mode: bool
    return_bias: bool
    seq_length: int | None
    micro_batch_size: int | None


class _CoreOptions(TypedDict, total=False):
    """Keywords of attention cores that self-attention and cross-attention of one layer share."""

    softmax_scale: float | None
    softmax_type: SoftmaxType
    logit_softcap: float | None
    num_splits: int | None
    cp_comm_type: CpCommType
    hierarchical_context_parallel_sizes: tuple[int, int] | None
    cp_load_balanced: bool


class _CoreKeywords(_CoreOptions, total=False):
    """Keywords of every layer with an attention core."""

    window_size: Window | None
    return_max_logit: bool


class DotProductAttentionKeywords(_CoreKeywords, total=False):
    """Keywords of `DotProductAttention`."""

    attn_mask_type: MaskType
    rngs: nnx.Rngs | None


class DotProductAttentionCallKeywords(TypedDict, total=False):
    """Keywords of a call of `DotProductAttention`."""

    q_lengths: Array | None
    kv_lengths: Array | None
    packed_seq_params: PackedSeqParams | None
    core_attention_bias_type: BiasType
    core_attention_bias: Array | None
    alibi_slopes: Array | None
    dropout_key: Key | None
    attn_mask_type: MaskType | None
    window_size: Window | None
    checkpoint_core_attention: bool
    return_max_logit: bool | None


class _ProjectedCoreOptions(_KernelKeywords, _CoreOptions, total=False):
    """Keywords of attention with its projections that self-attention and cross-attention of one layer share."""

    normalization: Normalization
    zero_centered_gamma: bool
    qk_norm_type: Normalization | None
    qk_norm_before_rope: bool
    qk_norm_across_heads: bool
    fuse_qkv_params: bool
    set_parallel_mode: bool
    output_layer_init_method: Initializer | None


class AttentionOptions(_ProjectedCoreOptions, total=False):
    """Keywords of `MultiheadAttention` and of `TransformerLayer`, which hold for both attentions of a layer.

    Code that builds such layers makes this group once and hands it on, ``**options``.
    """

    num_gqa_groups: int | None
    kv_channels: int | None
    attention_dropout: float
    layernorm_epsilon: float


class CrossAttentionOptions(AttentionOptions, total=False):
    """Keywords of `MultiheadAttention` that the cross-attention of a `TransformerLayer` is given."""

    input_layernorm: bool
    return_layernorm_output: bool
    attn_mask_type: MaskType
    window_size: Window | None


class SelfAttentionOptions(CrossAttentionOptions, total=False):
    """Keywords of `MultiheadAttention` that the self-attention of a `TransformerLayer` is given."""

    return_max_logit: bool
    qkv_bias: bool


class _AttentionKeywords(_ProjectedCoreOptions, _CoreKeywords, total=False):
    """Keywords of every layer with attention and its projections."""

    qkv_bias: bool


class MultiheadAttentionKeywords(_AttentionKeywords, total=False):
    """Keywords of `MultiheadAttention`."""

    num_gqa_groups: int | None
    return_layernorm_output: bool
    attention_type: Literal["self", "cross"]
    attn_mask_type: MaskType
    return_bias: bool


class AttentionCallKeywords(TypedDict, total=False):
    """Keywords of a call of `MultiheadAttention`."""

    sequence_lengths: Array | None
    encoder_lengths: Array | None
    packed_seq_params: PackedSeqParams | None
    dropout_key: Key | None
    return_max_logit: bool | None


class TransformerLayerCallKeywords(AttentionCallKeywords, total=False):
    """Keywords of a call of `TransformerLayer`."""

    padding_mask: Array | None


class TransformerLayerKeywords(_AttentionKeywords, total=False):
    """Keywords of `TransformerLayer`."""

    apply_residual_connection_post_layernorm: bool
    layer_number: int | None
    apply_query_key_layer_scaling: bool
    output_layernorm: bool
    block_output_layernorm: bool
    block_input_layernorm: bool
    parallel_attention_mlp: bool
    attention_softmax_in_fp32: bool
    layer_type: Literal["encoder", "decoder"]
    kv_channels: int | None
    self_attn_mask_type: MaskType
    enc_dec_attn_mask_type: MaskType
    enc_dec_window_size: Window | None
    drop_path_rate: float
    latent: LatentAttentionOptions | None
    activation: ActivationLike
    experts: MoEOptions | None
    seq_length: int | None
    micro_batch_size: int | None
