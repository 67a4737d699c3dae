"""Multi-latent attention in NumPy and fp64, after Megatron's ``MLASelfAttention``; nothing is taken from jax_te."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def yarn(
    positions: np.ndarray, d: int, base: float, factor: float, original: int, mscale: float, mscale_all_dim: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Cosines and sines ``[s, d]`` of Megatron's YaRN with their amplitude, and the factor of the scores."""
    exponents = np.arange(0, d, 2) / d
    extra, inter = base**-exponents, base**-exponents / factor

    def bound(turns: float) -> float:
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(bound(32.0)), 0), min(math.ceil(bound(1.0)), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / ((high - low) or 0.001), 0, 1)
    angles = positions[:, None] * (inter * ramp + extra * (1 - ramp))
    angles = np.concatenate([angles, angles], axis=-1)

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = m(mscale) / m(mscale_all_dim)
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude, m(mscale_all_dim) ** 2


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Heads ``[b, s, n, d]``: neighbours become halves (``mla_rotary_interleaved``), and halves are rotated."""
    x = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    first, second = np.split(x, 2, axis=-1)
    return x * cos[:, None] + np.concatenate([-second, first], axis=-1) * sin[:, None]


def rms(x: np.ndarray, scale: np.ndarray | None, epsilon: float = 1e-5) -> np.ndarray:
    return x if scale is None else x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def attention(p: Mapping[str, Any], x: np.ndarray, sizes: Any, n: int, rope: Any) -> np.ndarray:
    """Output ``[b, s, h]`` of causal attention with kernels ``[in, out]`` and the norms' scales of ``p``."""
    b, s, _ = x.shape
    cos, sin, factor = rope
    dn, dr, dv = sizes.qk_head_dim, sizes.qk_pos_emb_head_dim, sizes.v_head_dim
    x = rms(x, p.get("layernorm.scale"))
    if sizes.q_lora_rank is None:
        q = x @ p["query.kernel"]
    else:
        q = rms(x @ p["q_down.kernel"], p.get("q_up.scale")) @ p["q_up.kernel"]
    q = q.reshape(b, s, n, dn + dr)
    down = x @ p["kv_down.kernel"]
    latent, k_rope = down[..., : sizes.kv_lora_rank], down[..., sizes.kv_lora_rank :]
    kv = (rms(latent, p.get("kv_up.scale")) @ p["kv_up.kernel"]).reshape(b, s, n, dn + dv)
    k_rope = np.broadcast_to(rotate(k_rope[:, :, None], cos, sin), (b, s, n, dr))
    query = np.concatenate([q[..., :dn], rotate(q[..., dn:], cos, sin)], axis=-1)
    key = np.concatenate([kv[..., :dn], k_rope], axis=-1)
    scores = np.einsum("bsnd,btnd->bnst", query, key) * factor / math.sqrt(dn + dr)
    scores = np.where(np.tri(s, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    context = np.einsum("bnst,btnd->bsnd", scores / scores.sum(axis=-1, keepdims=True), kv[..., dn:])
    return context.reshape(b, s, n * dv) @ p["proj.kernel"]
