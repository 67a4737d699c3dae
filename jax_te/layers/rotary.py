"""Rotary position embedding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_te.typing import Array

Rotary = tuple[Array, Array]
"""Cosines and sines of the angles, fp32 ``[..., s, d/2]`` each."""


def rotary_embedding(positions: Array, d: int, base: float = 10000.0) -> Rotary:
    """Cosines and sines of ``position * base**(-2 i / d)`` for ``i`` in ``0 … d/2 - 1``.

    Args:
        positions: integers ``[..., s]``.
        d: head size, even.
        base: of the geometric series of wavelengths, > 0.

    Returns:
        Two fp32 arrays ``[..., s, d/2]``, for `apply_rotary`.

    Raises:
        ValueError: for an odd ``d`` or a ``base`` that is not positive.

    Source: ``megatron.core.models.common.embeddings.RotaryEmbedding``; Su et al. 2021.

    >>> cos, sin = rotary_embedding(jnp.arange(3), 4)
    >>> cos.shape, float(cos[0, 0])
    ((3, 2), 1.0)
    """
    if d < 2 or d % 2:
        raise ValueError(f"rotary embedding needs an even head size, got {d}; change kv_channels")
    if not base > 0.0:
        raise ValueError(f"rotary base must be > 0, got {base!r}")
    frequency = (base ** (-np.arange(0, d, 2) / d)).astype(np.float32)
    frequency = frequency.reshape((1,) * positions.ndim + (d // 2,))
    angle = positions.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rotary(x: Array, rotary: Rotary) -> Array:
    """Rotate the pairs ``(x[i], x[i + d/2])`` of every head by their angles: Megatron's and Llama's non-interleaved
    form.

    Args:
        x: ``[b, s, n, d]``.
        rotary: from `rotary_embedding`, for positions ``[s]`` or ``[b, s]``.

    Returns:
        Like ``x``; computed in fp32.

    Raises:
        ValueError: if the angles are for another head size.

    >>> apply_rotary(jnp.ones((1, 2, 1, 2)), rotary_embedding(jnp.arange(2), 2))[0, 0, 0].tolist()
    [1.0, 1.0]
    """
    cos, sin = rotary
    half = x.shape[-1] // 2
    if cos.shape[-1] != half or x.shape[-1] % 2:
        raise ValueError(f"rotary embedding of head size {2 * cos.shape[-1]} for heads of size {x.shape[-1]}")
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
