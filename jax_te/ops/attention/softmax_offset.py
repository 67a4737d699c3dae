"""What a sum of exponentials without the softmax's offset becomes with it."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.typing import Array


def offset_of(spec: AttentionSpec, arrays: AttentionArrays) -> Array | None:
    """Exponent of what the denominator has beside the scores', fp32 ``[1, n, 1]``: 0 for ``"off-by-one"``; or None.

    >>> from jax_te.ops.attention.spec import describe
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> spec = describe((q, q, q), "causal", softmax_type="off-by-one")
    >>> offset_of(spec, AttentionArrays()).shape
    (1, 2, 1)
    """
    if spec.softmax_type == "vanilla":
        return None
    if arrays.softmax_offset is None:
        return jnp.zeros((1, spec.heads, 1), jnp.float32)
    return arrays.softmax_offset.astype(jnp.float32).reshape(1, -1, 1)


def offset_gradient(offset: Array, log_sum: Array, out: Array, g: Array) -> Array:
    """Gradient ``[n]`` of a learnable offset: what its share of the softmax takes from the output.

    Args:
        offset: fp32 ``[n]``.
        log_sum: logarithm of the denominator, fp32 ``[b, n, s]``; anything where the output is zero.
        out, g: the output and its gradient, ``[b, s, n, dv]``.

    >>> one = jnp.ones((1, 1, 1, 1))
    >>> offset_gradient(jnp.zeros(1), jnp.log(jnp.full((1, 1, 1), 4.0)), one, one).tolist()
    [-0.25]
    """
    taken = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [b, n, s]
    share = jnp.exp(offset.astype(jnp.float32).reshape(1, -1, 1) - log_sum)
    return -jnp.sum(jnp.where(taken == 0.0, 0.0, share * taken), axis=(0, 2))
