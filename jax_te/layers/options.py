"""Groups of arguments that a layer passes to the layers inside of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.ops import Window
from jax_te.typing import Array, DTypeLike, Initializer, TensorGroup


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the groups. A field has the name of the constructor keyword that it holds.

    Constructors spell out their keywords, so that help() and editors show them. A constructor collects its keywords by
    name (`of`) and spreads them again, all or those that an inner layer takes (`keywords`). A new option is therefore a
    keyword of the constructors that take it, a field of one group and the code that reads it.
    """

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **others: Any) -> Any:
        """Return the group that has the values of ``arguments`` under the names of its fields.

        Args:
            arguments: arguments of a constructor, its ``locals()``. Names that are not fields are ignored.
            others: fields whose values are not in ``arguments``, or differ from them.

        Raises:
            TypeError: for a field without a value.

        >>> NormOptions.of({"normalization": "LayerNorm", "bias": True}, zero_centered_gamma=False)
        NormOptions(normalization='LayerNorm', zero_centered_gamma=False)
        """
        # By name, so that an option is not spelled a second and third time between its keyword and its field.
        names = {field.name for field in fields(cls)} & arguments.keys()
        return cls(**{name: arguments[name] for name in names} | others)

    def keywords(self, group: type[Options] | None = None) -> dict[str, Any]:
        """Return the options as keywords: all of them, or those of one ``group`` among the bases of this class.

        >>> NormOptions(normalization="RMSNorm", zero_centered_gamma=True).keywords()
        {'normalization': 'RMSNorm', 'zero_centered_gamma': True}
        """
        # dataclasses.asdict would copy the values: an initializer may be an object that cannot be copied.
        return {field.name: getattr(self, field.name) for field in fields(group or self)}


@dataclass(frozen=True, kw_only=True)
class NormOptions(Options):
    """Options of every norm; see `LayerNormLinear`."""

    normalization: str
    zero_centered_gamma: bool


@dataclass(frozen=True, kw_only=True)
class LinearOptions(Options):
    """Options of every linear layer; see `Linear`."""

    sequence_parallel: bool
    tp_group: TensorGroup
    tp_size: int
    fuse_wgrad_accumulation: bool
    params_dtype: DTypeLike


@dataclass(frozen=True, kw_only=True)
class BlockOptions(NormOptions, LinearOptions):
    """Options shared by the attention block and the feed-forward block: norm and subsequent projections."""

    bias: bool
    init_method: Initializer | None
    output_layer_init_method: Initializer | None
    set_parallel_mode: bool


@dataclass(frozen=True, kw_only=True)
class CoreOptions(Options):
    """Options of `DotProductAttention`."""

    num_gqa_groups: int | None
    attention_dropout: float
    attn_mask_type: str
    window_size: Window | None
    softmax_scale: float | None
    softmax_type: str
    logit_softcap: float | None
    return_max_logit: bool = False  # here and below, fields have defaults if `TransformerLayer` lacks the keyword
    num_splits: int | None
    cp_comm_type: str
    hierarchical_context_parallel_sizes: tuple[int, int] | None
    cp_load_balanced: bool


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(CoreOptions, BlockOptions):
    """Options of `MultiheadAttention`."""

    layernorm_epsilon: float
    input_layernorm: bool
    return_layernorm_output: bool
    attention_type: str = "self"
    kv_channels: int | None
    qk_norm_type: str | None
    qk_norm_before_rope: bool
    qkv_bias: bool
    fuse_qkv_params: bool
    return_bias: bool = False


class CoreCall(NamedTuple):
    """Arguments of one call of `DotProductAttention`, apart from queries, keys and values."""

    attention_mask: Array | None
    q_lengths: Array | None
    kv_lengths: Array | None
    packed_seq_params: PackedSeqParams | None
    core_attention_bias_type: str
    core_attention_bias: Array | None
    alibi_slopes: Array | None
    dropout_key: Array | None
    attn_mask_type: str
    window_size: Window | None
    checkpoint_core_attention: bool
