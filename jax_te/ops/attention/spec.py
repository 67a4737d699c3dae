"""What an attention call is, apart from its numbers: shared by the op and the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

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
MASK_TYPES: tuple[str, ...] = get_args(MaskType)

BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]
BIAS_TYPES: tuple[str, ...] = get_args(BiasType)

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
SOFTMAX_TYPES: tuple[str, ...] = get_args(SoftmaxType)

Window = tuple[int, int]
"""Positions seen to the left and to the right of a query's own, which is seen as well; -1 means all."""

QKV = tuple[Array] | tuple[Array, Array, Array]
"""``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, dv])``."""


class AttentionArrays(NamedTuple):
    """The arrays of a call beside queries, keys and values; see `dot_product_attention`.

    The last three say which part of the whole call a device has, for plain JAX: int32 places ``[sq]`` and ``[skv]`` of
    its queries and keys, and for dropout ``[b, n]``, the number of each head's first row among the rows of all heads.
    None: it has the whole.
    """

    mask: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    segments: Segments | None = None
    bias: Array | None = None
    softmax_offset: Array | None = None
    dropout_key: Array | None = None
    q_positions: Array | None = None
    kv_positions: Array | None = None
    rows: Array | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything about an attention call that is known before it runs; what `supports` decides on.

    Args:
        dtype: of queries, keys and values.
        batch, q_length, kv_length, heads, groups, head_dim, v_head_dim: ``b, sq, skv, n, g, d, dv``.
        mask_type, window, bias_type, softmax_type, scale, logit_softcap, dropout_rate, return_max_logit: see
            `dot_product_attention`.
        bias_shape: of the bias array.
        max_segments: packed sequences in a row at most; 0: rows hold one sequence each.
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
        """Whether sequence lengths are needed."""
        return self.mask_type.startswith("padding")

    @property
    def is_causal(self) -> bool:
        """Whether a query sees nothing behind its own position."""
        return "causal" in self.mask_type

    @property
    def is_bottom_right(self) -> bool:
        """Whether the last query's position is the last key's, not the first one's the first."""
        return self.mask_type.endswith("bottom_right")

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but scores, a mask type and dropout."""
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
    """Query, key and value, whichever form they came in."""
    if len(qkv) == 1:
        packed = qkv[0]
        return packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    return qkv


def normal_window(window: Window | None, mask_type: str) -> Window:
    """``(left, right)`` with -1 for all, and 0 to the right where the mask is causal.

    Raises:
        ValueError: for anything but two integers >= -1, or positions to the right under a causal mask.

    >>> normal_window((128, -1), "causal")
    (128, 0)
    """
    causal = "causal" in mask_type
    if window is None:
        return (-1, 0 if causal else -1)
    if (
        not isinstance(window, tuple | list)
        or len(window) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window)
    ):
        raise ValueError(f"window_size must be (left, right), two integers >= -1 (-1: all), got {window!r}")
    left, right = window
    if causal and right > 0:
        raise ValueError(
            f"window_size {tuple(window)} shows {right} positions ahead, mask type {mask_type!r} none; take "
            f"({left}, 0), or a mask type that is not causal"
        )
    return (left, 0 if causal else right)


def shape_of(qkv: QKV) -> tuple[int, int, int, int, int, int, int]:
    """``b, sq, skv, n, g, d, dv`` of queries, keys and values.

    Raises:
        ValueError: for shapes that do not go together.
    """
    if len(qkv) == 1:
        shape = qkv[0].shape
        if len(shape) != 5 or shape[2] != 3:
            raise ValueError(f"a packed qkv has shape [b, s, 3, n, d], got {shape}")
        b, s, _, n, d = shape
        return b, s, s, n, n, d, d
    q, k, v = qkv
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q must be [b, sq, n, d], k [b, skv, g, d] and v [b, skv, g, dv]; "
            f"got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    b, sq, n, d = q.shape
    _, skv, g, _ = k.shape
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and head size")
    if n % g:
        raise ValueError(f"the number of query heads {n} is not divisible by the key/value heads {g}")
    return b, sq, skv, n, g, d, v.shape[3]


def describe(
    qkv: QKV,
    mask_type: MaskType,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    *,
    window: Window | None = None,
    bias_type: BiasType = "no_bias",
    bias_shape: tuple[int, ...] | None = None,
    softmax_type: SoftmaxType = "vanilla",
    logit_softcap: float | None = None,
    return_max_logit: bool = False,
    max_segments: int = 0,
) -> AttentionSpec:
    """The spec of a call, checked.

    Raises:
        ValueError: for shapes that do not go together, an unknown mask, bias or softmax type, or a soft cap that is not
            positive.
    """
    for name, value, allowed in (
        ("mask_type", mask_type, MASK_TYPES),
        ("bias_type", bias_type, BIAS_TYPES),
        ("softmax_type", softmax_type, SOFTMAX_TYPES),
    ):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; allowed: {', '.join(allowed)}")
    if logit_softcap is not None and not logit_softcap > 0.0:
        raise ValueError(f"logit_softcap must be > 0, or None for no cap; got {logit_softcap!r}")
    if max_segments and not mask_type.startswith("padding"):
        raise ValueError(
            f"packed sequences need a padding mask type, got {mask_type!r}; take 'padding' in place of 'no_mask', "
            "'padding_causal' in place of 'causal'"
        )
    b, sq, skv, n, g, d, dv = shape_of(qkv)
    return AttentionSpec(
        dtype=jnp.dtype(qkv[0].dtype),
        batch=b,
        q_length=sq,
        kv_length=skv,
        heads=n,
        groups=g,
        head_dim=d,
        v_head_dim=dv,
        mask_type=mask_type,
        window=normal_window(window, mask_type),
        bias_type=bias_type,
        bias_shape=bias_shape,
        softmax_type=softmax_type,
        scale=d**-0.5 if scale is None else float(scale),
        logit_softcap=None if logit_softcap is None else float(logit_softcap),
        dropout_rate=float(dropout_rate),
        return_max_logit=return_max_logit,
        max_segments=max_segments,
        packed=len(qkv) == 1,
    )
