"""Zero rows appended to a matrix, for GEMMs that require multiples of 16 or 32 rows.

Zero rows affect only the scales of their own blocks, and add nothing to a sum over rows.
"""

from __future__ import annotations

from math import prod

import jax.numpy as jnp

from jax_te.typing import Array


def padded_size(size: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``size``.

    >>> padded_size(12, 16)
    16
    """
    return size + -size % multiple


def pad_rows(x: Array, axis: int, multiple: int) -> Array:
    """Return ``x``, seen as the matrix whose columns begin at ``axis``, with zeros up to a multiple of rows.

    Args:
        x: ``[..., *c]``.
        axis: axis where its columns ``*c`` begin.
        multiple: multiple to which the number of rows is padded; at least one multiple.

    Returns:
        ``[rows, *c]``.

    >>> pad_rows(jnp.ones((3, 4, 32)), -1, 16).shape
    (16, 32)
    """
    axis %= x.ndim
    tokens = prod(x.shape[:axis])
    rows = padded_size(max(tokens, 1), multiple)
    flat = x.reshape(tokens, *x.shape[axis:])
    return jnp.pad(flat, ((0, rows - tokens), *((0, 0) for _ in flat.shape[1:])))


def unpad_rows(y: Array, lead: tuple[int, ...]) -> Array:
    """Return the first rows of ``[rows, *c]`` as ``[*lead, *c]``.

    >>> unpad_rows(jnp.ones((16, 8)), (3, 4)).shape
    (3, 4, 8)
    """
    return y[: prod(lead)].reshape(*lead, *y.shape[1:])
