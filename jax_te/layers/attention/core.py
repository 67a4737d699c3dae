"""The interface between a layer with attention and its core."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jax_te._validation import brief
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.ops import BiasType, ContextParallel, MaskType, Window
from jax_te.typing import Array, Key


class AttentionCore(Protocol):
    """A module in the place of `DotProductAttention`, as ``layer.core_attention``.

    `MultiheadAttention` reads these attributes and gives all arguments of the call by name; see `DotProductAttention`
    for each. A core that lacks an attribute is refused when the layer is called.

    >>> from flax import nnx
    >>> from jax_te.layers import DotProductAttention, MultiheadAttention
    >>> class Halved(DotProductAttention):
    ...     def __call__(self, query, *operands, **options):
    ...         return super().__call__(query / 2, *operands, **options)
    >>> layer = MultiheadAttention(32, 4, attention_dropout=0.0, rngs=nnx.Rngs(0))
    >>> layer.core_attention = Halved(4, 8)
    """

    num_attention_heads: int
    num_gqa_groups: int
    kv_channels: int
    attention_dropout: float
    attn_mask_type: MaskType
    window_size: Window | None
    return_max_logit: bool
    context_parallel: ContextParallel

    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Array | None,
        q_lengths: Array | None,
        kv_lengths: Array | None,
        packed_seq_params: PackedSeqParams | None,
        core_attention_bias_type: BiasType,
        core_attention_bias: Array | None,
        alibi_slopes: Array | None,
        dropout_key: Key | None,
        attn_mask_type: MaskType,
        window_size: Window | None,
        checkpoint_core_attention: bool,
        return_max_logit: bool,
    ) -> Any:
        """Return ``y [b, sq, n, d]``; with max logits, of the layer or the call, ``(y, max_logit)``."""
        ...


class CoreCall(NamedTuple):
    """Arguments of one call of a core, apart from queries, keys and values; those of the layer filled in."""

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


_ATTRIBUTES = tuple(AttentionCore.__annotations__)


def is_core(module: Any) -> bool:
    """Return whether a module has the attributes of an `AttentionCore`.

    >>> is_core(3)
    False
    """
    return callable(module) and all(hasattr(module, name) for name in _ATTRIBUTES)


def check_core(core: Any) -> None:
    """Raise TypeError for a module in the place of a core that lacks attributes of `AttentionCore`."""
    if is_core(core):
        return
    lacks = [name for name in _ATTRIBUTES if not hasattr(core, name)] or ["__call__"]
    raise TypeError(
        f"core_attention must have the interface of jax_te.layers.AttentionCore, got {brief(core)}, which lacks "
        f"{', '.join(lacks)}; derive it from DotProductAttention, or add them"
    )
