"""The static description of an attention call, and its arrays, shared by the op and the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_te.ops.attention.segments import Segments
from jax_te.typing import Array, DTypeLike

MaskType = Literal[
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
]

BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]

Window = tuple[int, int]
"""Numbers of positions to the left and right of its own that a query attends to; -1 means all."""

QKV = tuple[Array] | tuple[Array, Array, Array]
"""``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, dv])``."""


class AttentionArrays(NamedTuple):
    """Arrays of a call other than queries, keys and values; see `dot_product_attention`.

    The last three locate a device's shard within the whole call, for plain JAX: int32 positions ``[sq]`` and ``[skv]``
    of its queries and keys, and for dropout int32 ``[b, n]``, the global index of each head's first softmax row. None:
    the device has the whole call.
    """

    mask: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    segments: Segments | None = None
    bias: Array | None = None
    softmax_offset: Array | None = None
    dropout_key: Array | None = None
    # A shard's positions need not be contiguous: in zig-zag order they are two chunks, after an all-gather any order.
    q_positions: Array | None = None
    kv_positions: Array | None = None
    rows: Array | None = None

    def same_lengths(self) -> bool:
        """Return whether queries and keys have the same lengths."""
        # By identity: while tracing nothing else shows that two arrays are equal.
        s = self.segments
        same = s is None or (s.q_lengths is s.kv_lengths and s.q_offsets is s.kv_offsets)
        return same and self.q_lengths is self.kv_lengths


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts about an attention call, by which backends accept or refuse it.

    Args:
        dtype: dtype of queries, keys and values.
        batch, q_length, kv_length, heads, groups, head_dim, v_head_dim: ``b, sq, skv, n, g, d, dv``.
        mask_type, window, bias_type, softmax_type, scale, logit_softcap, dropout_rate, return_max_logit: see
            `dot_product_attention`.
        bias_shape: shape of the bias array.
        max_segments: the most packed sequences in a row; 0: each row holds one sequence.
        packed: whether queries, keys and values are one array.
    """

    dtype: DTypeLike
    batch: int
    q_length: int
    kv_length: int
    heads: int
    groups: int
    head_dim: int
    v_head_dim: int
    mask_type: MaskType
    window: Window = (-1, -1)
    bias_type: BiasType = "no_bias"
    bias_shape: tuple[int, ...] | None = None
    softmax_type: SoftmaxType = "vanilla"
    scale: float
    logit_softcap: float | None = None
    dropout_rate: float
    return_max_logit: bool = False
    max_segments: int = 0
    packed: bool

    @property
    def is_padding(self) -> bool:
        """Whether the mask depends on sequence lengths."""
        return self.mask_type.startswith("padding")

    @property
    def is_causal(self) -> bool:
        """Whether a query attends to no key after its own position."""
        return "causal" in self.mask_type

    @property
    def is_bottom_right(self) -> bool:
        """Whether the diagonal ends at the last query and key, rather than starting at the first ones."""
        return self.mask_type.endswith("bottom_right")

    @property
    def is_plain(self) -> bool:
        """Whether the call uses only scores, a mask type and dropout."""
        # Under a causal mask window[1] is 0: that is the mask, not a window.
        return (
            self.window[0] < 0
            and (self.is_causal or self.window[1] < 0)
            and self.bias_type == "no_bias"
            and self.softmax_type == "vanilla"
            and self.logit_softcap is None
            and not self.return_max_logit
            and not self.max_segments
            and self.head_dim == self.v_head_dim
        )


def unpack(qkv: QKV) -> tuple[Array, Array, Array]:
    """Return query, key and value, packed or not."""
    if len(qkv) == 1:
        # For plain JAX, which fuses these slices; cuDNN is handed the packed array itself.
        packed = qkv[0]
        return packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    return qkv
