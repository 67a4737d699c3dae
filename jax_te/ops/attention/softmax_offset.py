"""Softmax with an extra term in its denominator: ``exp(s) / (exp(offset) + sum exp(s))``."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.typing import Array


def offset_of(spec: AttentionSpec, arrays: AttentionArrays) -> Array | None:
    """Return the exponent of the extra term, fp32 ``[1, n, 1]``: 0 for ``"off-by-one"``; None without one.

    >>> from jax_te.ops.attention.checks import attention_spec
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> spec = attention_spec((q, q, q), "causal", softmax_type="off-by-one")
    >>> offset_of(spec, AttentionArrays()).shape
    (1, 2, 1)
    """
    if spec.softmax_type == "vanilla":
        return None
    if arrays.softmax_offset is None:
        return jnp.zeros((1, spec.heads, 1), jnp.float32)
    return arrays.softmax_offset.astype(jnp.float32).reshape(1, -1, 1)


def offset_gradient(offset: Array, log_sum: Array, out: Array, g: Array) -> Array:
    """Return the gradient ``[n]`` of a learnable offset.

    The extra term is a key with a value of zero: its gradient is minus its probability times ``sum(out * g)``.

    Args:
        offset: fp32 ``[n]``.
        log_sum: logarithm of the denominator, fp32 ``[b, n, s]``; any value where the output is zero.
        out, g: the output and its gradient, ``[b, s, n, dv]``.

    >>> one = jnp.ones((1, 1, 1, 1))
    >>> offset_gradient(jnp.zeros(1), jnp.log(jnp.full((1, 1, 1), 4.0)), one, one).tolist()
    [-0.25]
    """
    weighted = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [b, n, s]
    probability = jnp.exp(offset.astype(jnp.float32).reshape(1, -1, 1) - log_sum)
    # For a query that attends to nothing log_sum may be -inf or unwritten, and inf * 0 would be nan.
    return -jnp.sum(jnp.where(weighted == 0.0, 0.0, probability * weighted), axis=(0, 2))
