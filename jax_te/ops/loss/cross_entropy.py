"""Softmax cross-entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.sharding import auto_region
from jax_te.typing import Array, LogicalAxes


def softmax_cross_entropy(logits: Array, labels: Array, *, out_axes: LogicalAxes | None = None) -> Array:
    """Return ``logsumexp(logits) - logits[label]`` for each position, in nats.

    Computed in fp32; residuals are the logits in their own dtype and one fp32 number per position.

    Args:
        logits: ``[..., v]`` fp32, bf16 or fp16.
        labels: integers ``[...]`` in ``[0, v)``. A label outside of it gives a loss and gradient of nan.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.

    Returns:
        fp32 ``[...]``. The gradient of ``logits`` has the dtype of ``logits``.

    Raises:
        ValueError, TypeError: for shapes that do not match, or labels that are not integers.

    >>> round(float(softmax_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)
    1.3863
    """
    labels = check_labels(labels, logits.shape)
    return auto_region(_cross_entropy, out_axes)(logits, labels)


def check_labels(labels: Array, logits_shape: tuple[int, ...]) -> Array:
    """Return labels in a dtype wide enough for every index of the vocabulary.

    Raises:
        ValueError, TypeError: for labels that do not fit logits of this shape, or that are not integers.
    """
    if labels.shape != logits_shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} must have the shape of the logits {logits_shape} without the last axis"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    # The comparison with the vocabulary's indices is made in the labels' dtype, where int8 would wrap around.
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


@jax.custom_vjp
def _cross_entropy(logits: Array, labels: Array) -> Array:
    return _forward(logits, labels)[0]


def _is_label(logits: Array, labels: Array) -> Array:
    positions = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return positions == labels[..., None]


def cross_entropy_value(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return losses and log-sum-exp, fp32 ``[...]``; nan where a label is outside the vocabulary."""
    # The cast is fused into the reductions: no fp32 copy of the logits is stored.
    wide = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(wide, axis=-1)
    # A masked sum, not a gather: it partitions over a sharded vocabulary, and XLA fuses it with the pass above.
    own = jnp.sum(jnp.where(_is_label(logits, labels), wide, 0.0), axis=-1)
    valid = (labels >= 0) & (labels < logits.shape[-1])
    # Not a silent zero: a nan log-sum-exp makes the loss nan, and in backward the gradient.
    lse = jnp.where(valid, lse, jnp.nan)
    return lse - own, lse


def cross_entropy_gradient(logits: Array, labels: Array, lse: Array, g: Array) -> Array:
    """Return the gradient of the logits, fp32 ``[..., v]``, from that of the losses, ``g [...]``."""
    probs = jnp.exp(logits.astype(jnp.float32) - lse[..., None])
    return (probs - _is_label(logits, labels).astype(jnp.float32)) * g[..., None]


def _forward(logits: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    loss, lse = cross_entropy_value(logits, labels)
    return loss, (logits, labels, lse)


def _backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, None]:
    logits, labels, lse = saved
    return cross_entropy_gradient(logits, labels, lse, g).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)
