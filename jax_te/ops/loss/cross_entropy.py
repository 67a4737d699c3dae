"""Softmax cross-entropy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_te._validation import checked
from jax_te.ops.integers import as_int32
from jax_te.ops.loss.reduction import LossOptions, Reduction, reduced_loss
from jax_te.sharding import current_mesh
from jax_te.typing import Array, LogicalAxes

_OPTIONS = LossOptions()


@checked
def softmax_cross_entropy(
    logits: Array,
    labels: Array,
    *,
    weights: Array | None = None,
    options: LossOptions = _OPTIONS,
    reduction: Reduction = "none",
    out_axes: LogicalAxes | None = None,
) -> Array:
    """Return ``logsumexp(logits) - logits[label]`` for each position, in nats, or their weighted mean or sum.

    Computed in fp32; residuals are the logits in their own dtype and one fp32 number per position. On a mesh, mean and
    sum are over the whole arrays, whatever their sharding.

    Args:
        logits: ``[..., v]`` fp32, bf16 or fp16.
        labels: integers ``[...]`` in ``[0, v)``, or ``options.ignore_index``: no loss, no gradient, no part in a mean.
            Another label gives a loss and gradient of nan, also where its weight is 0.
        weights: ``[...]``, multiplies the losses. None: all 1.
        options: labels that are ignored, label smoothing.
        reduction: ``"none"``; ``"sum"`` of the weighted losses; ``"mean"``: their sum divided by that of the weights, 0
            where no token counts.
        out_axes: logical axes of the losses; required on a mesh with Explicit axes for ``"none"``, else not read.

    Returns:
        fp32 ``[...]``, or ``[]``. The gradient of ``logits`` has the dtype of ``logits``.

    Raises:
        ValueError: for shapes that do not match, or an unknown reduction.
        TypeError: for logits that are not fp32, bf16 or fp16, or labels that are not integers.

    Source: ``torch.nn.functional.cross_entropy``, Transformer Engine's ``parallel_cross_entropy``.

    >>> round(float(softmax_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)
    1.3863
    >>> round(float(softmax_cross_entropy(jnp.zeros((2, 4)), jnp.array([2, -100]), reduction="mean")), 4)
    1.3863
    """
    labels = check_labels(labels, logits.shape)
    return reduced_loss(_cross_entropy, (logits,), labels, weights, options, reduction, out_axes)


def check_labels(labels: Array, logits_shape: tuple[int, ...]) -> Array:
    """Return labels as int32, see `as_int32`.

    Raises:
        ValueError, TypeError: for labels that do not fit logits of this shape, or that are not integers.
    """
    if labels.shape != logits_shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} must have the shape of the logits {logits_shape} without the last axis"
        )
    return as_int32("labels", labels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options: LossOptions, logits: Array, labels: Array) -> Array:
    return _forward(options, logits, labels)[0]


def _is_label(logits: Array, labels: Array) -> Array:
    positions = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return positions == labels[..., None]


def cross_entropy_value(options: LossOptions, logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return losses and log-sum-exp, fp32 ``[...]``; nan where a label is outside the vocabulary and not ignored."""
    # The cast is fused into the reductions: no fp32 copy of the logits is stored.
    wide = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(wide, axis=-1)
    if current_mesh() is None:
        own = jnp.take_along_axis(wide, jnp.clip(labels, 0, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    else:
        # A masked sum, not a gather: it partitions over a sharded vocabulary. It reads all logits once more.
        own = jnp.sum(jnp.where(_is_label(logits, labels), wide, 0.0), axis=-1)
    if smoothing := options.label_smoothing:
        own = (1.0 - smoothing) * own + smoothing * jnp.mean(wide, axis=-1)
    ignored, inside = options.ignored(labels), (labels >= 0) & (labels < logits.shape[-1])
    # Not a silent zero: a nan log-sum-exp makes the loss nan, and in backward the gradient.
    lse = jnp.where(inside | ignored, lse, jnp.nan)
    return jnp.where(ignored, 0.0, lse - own), lse


def cross_entropy_gradient(options: LossOptions, logits: Array, labels: Array, lse: Array, g: Array) -> Array:
    """Return the gradient of the logits, fp32 ``[..., v]``, from that of the losses, ``g [...]``."""
    probs = jnp.exp(logits.astype(jnp.float32) - lse[..., None])
    target = _is_label(logits, labels).astype(jnp.float32)
    if smoothing := options.label_smoothing:
        target = (1.0 - smoothing) * target + smoothing / logits.shape[-1]
    # Not a factor 0: an ignored position's logits may be inf or nan.
    return jnp.where(options.ignored(labels)[..., None], 0.0, (probs - target) * g[..., None])


def _forward(options: LossOptions, logits: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    loss, lse = cross_entropy_value(options, logits, labels)
    return loss, (logits, labels, lse)


def _backward(options: LossOptions, saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, None]:
    logits, labels, lse = saved
    return cross_entropy_gradient(options, logits, labels, lse, g).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)
