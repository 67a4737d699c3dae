"""The random Hadamard transform of NVFP4 training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.typing import Array

HADAMARD_SIZE = 16
# Transformer Engine's signs. They are fixed because both operands of a GEMM must be rotated alike.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_rows(x: Array, *, inverse: bool = False) -> Array:
    """Return ``x [R, C]`` with every 16 rows rotated, computed in fp32 and rounded to the dtype of ``x``.

    The rotation is orthogonal, ``diag(signs) H / 4`` transposed, with Sylvester's Hadamard matrix ``H`` and Transformer
    Engine's signs: sums over rows of products of two rotated matrices do not change.

    Args:
        x: ``[R, C]``, ``R`` a multiple of 16.
        inverse: whether to rotate back.

    Raises:
        ValueError: for another number of rows.

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
    rotated = rotated / 4.0  # 1 / sqrt(16): the rotation keeps lengths
    # XLA may drop a cast to bf16 whose result is cast back to fp32; it keeps reduce_precision.
    info = jnp.finfo(x.dtype)
    rounded = jax.lax.reduce_precision(rotated, info.nexp, info.nmant)
    if info.nexp == 5:
        # reduce_precision does not support fp16's subnormal numbers, which are multiples of 2^-24.
        subnormal = jnp.round(rotated * 2.0**24) * 2.0**-24
        rounded = jnp.where(jnp.abs(rotated) < 2.0**-14, subnormal, rounded)
    return rounded.reshape(x.shape).astype(x.dtype)


def _butterflies(blocks: Array) -> Array:
    """Return ``H @ block`` for every block ``[n, 16, C]``."""
    # Not a matrix product, whose order of additions, and so its rounding, depends on the device and its libraries.
    shape, distance = blocks.shape, 1
    while distance < HADAMARD_SIZE:
        pairs = blocks.reshape(shape[0], -1, 2, distance, shape[2])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = jnp.stack([first + second, first - second], axis=2).reshape(shape)
        distance *= 2
    return blocks
