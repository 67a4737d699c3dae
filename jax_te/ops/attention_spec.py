"""Static description of an attention call, shared by the op and the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp

from jax_te.typing import Array, DTypeLike

MaskType = Literal["no_mask", "causal", "padding", "padding_causal", "arbitrary"]
MASK_TYPES: tuple[str, ...] = get_args(MaskType)

QKV = tuple[Array] | tuple[Array, Array, Array]
"""``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, d])``."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything about an attention call that is known before it runs; what `supports` decides on."""

    dtype: DTypeLike
    batch: int
    q_length: int
    kv_length: int
    heads: int
    groups: int
    head_dim: int
    mask_type: MaskType
    scale: float
    dropout_rate: float
    packed: bool

    @property
    def is_padding(self) -> bool:
        """Whether sequence lengths are needed."""
        return self.mask_type in ("padding", "padding_causal")

    @property
    def is_causal(self) -> bool:
        """Whether position ``i`` sees positions up to ``i`` only."""
        return self.mask_type in ("causal", "padding_causal")


def unpack(qkv: QKV) -> tuple[Array, Array, Array]:
    """Query, key and value, whichever form they came in."""
    if len(qkv) == 1:
        packed = qkv[0]
        return packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    return qkv


def describe(qkv: QKV, mask_type: MaskType, scale: float | None, dropout_rate: float) -> AttentionSpec:
    """The spec of a call, checked.

    Raises:
        ValueError: for shapes that do not go together or an unknown mask type.
    """
    if mask_type not in MASK_TYPES:
        raise ValueError(f"unknown mask_type {mask_type!r}; allowed: {', '.join(MASK_TYPES)}")
    packed = len(qkv) == 1
    if packed:
        shape = qkv[0].shape
        if len(shape) != 5 or shape[2] != 3:
            raise ValueError(f"a packed qkv has shape [b, s, 3, n, d], got {shape}")
        batch, q_length, _, heads, head_dim = shape
        kv_length, groups = q_length, heads
    else:
        q, k, v = qkv
        if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
            raise ValueError(
                f"q must be [b, sq, n, d] and k, v [b, skv, g, d] alike; got q {q.shape}, k {k.shape}, v {v.shape}"
            )
        batch, q_length, heads, head_dim = q.shape
        _, kv_length, groups, _ = k.shape
        if k.shape[0] != batch or k.shape[3] != head_dim:
            raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and head size")
        if heads % groups:
            raise ValueError(f"the number of query heads {heads} is not divisible by the key/value heads {groups}")
    return AttentionSpec(
        dtype=jnp.dtype(qkv[0].dtype),
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        mask_type=mask_type,
        scale=head_dim**-0.5 if scale is None else float(scale),
        dropout_rate=float(dropout_rate),
        packed=packed,
    )
