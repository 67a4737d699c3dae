"""The random Hadamard transform of NVFP4 training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.typing import Array

HADAMARD_SIZE = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_rows(x: Array, *, inverse: bool = False) -> Array:
    """Rotate every 16 rows of ``x [R, C]``: sums over rows of products of two rotated matrices stay what they were.

    Computed in fp32 and rounded to the dtype of ``x``.

    Args:
        x: ``[R, C]``, ``R`` a multiple of 16.
        inverse: undo it.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", section 4.2.

    >>> x = jnp.arange(32.0).reshape(16, 2)
    >>> bool(jnp.allclose(hadamard_rows(hadamard_rows(x), inverse=True), x, atol=1e-5))
    True
    """
    if x.shape[0] % HADAMARD_SIZE:
        raise ValueError(f"the Hadamard transform takes a multiple of {HADAMARD_SIZE} rows, got {x.shape[0]}")
    signs = jnp.asarray(_SIGNS, jnp.float32)[None, :, None]
    blocks = x.astype(jnp.float32).reshape(-1, HADAMARD_SIZE, x.shape[1])
    rotated = _butterflies(blocks) * signs if inverse else _butterflies(blocks * signs)
    rotated = rotated / 4.0
    info = jnp.finfo(x.dtype)  # a cast alone may be dropped where the result is cast back
    return jax.lax.reduce_precision(rotated, info.nexp, info.nmant).reshape(x.shape).astype(x.dtype)


def _butterflies(blocks: Array) -> Array:
    """``H @ block`` for every block ``[n, 16, C]``: sums in a fixed order, so that they round the same everywhere."""
    shape, distance = blocks.shape, 1
    while distance < HADAMARD_SIZE:
        pairs = blocks.reshape(shape[0], -1, 2, distance, shape[2])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = jnp.stack([first + second, first - second], axis=2).reshape(shape)
        distance *= 2
    return blocks
