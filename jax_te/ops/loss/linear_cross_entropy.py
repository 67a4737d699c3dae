"""Output projection and softmax cross-entropy in one, a chunk of the sequence at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_te._validation import check_positive, checked
from jax_te.ops.loss.cross_entropy import check_labels, cross_entropy_gradient, cross_entropy_value
from jax_te.ops.loss.reduction import LossOptions, Reduction, reduced_loss
from jax_te.sharding import axis_ranks, constrain
from jax_te.typing import Array, LogicalAxes

_LOGITS: LogicalAxes = ("batch", "sequence", "vocab")
_OPTIONS = LossOptions()


@checked
def linear_cross_entropy(
    x: Array,
    kernel: Array,
    labels: Array,
    *,
    chunks: int = 8,
    weights: Array | None = None,
    options: LossOptions = _OPTIONS,
    reduction: Reduction = "none",
    out_axes: LogicalAxes | None = None,
) -> Array:
    """Return `softmax_cross_entropy` of ``x @ kernel``, without storing all logits.

    The sequence is computed in ``chunks``, one after the other. A chunk's logits are fp32 and are computed again in
    backward, which costs one more GEMM and saves all but ``1 / chunks`` of the logits' memory. The vocabulary may be
    sharded over the mesh's tensor axis: maxima and sums are all-reduced, not logits. Where the sequence is sharded, a
    chunk has positions of every device, so that no device is idle and no position moves.

    Args:
        x: ``[b, s, h]`` fp32, bf16 or fp16.
        kernel: ``[h, v]``; multiplied in the dtype of ``x``.
        labels: integers ``[b, s]`` in ``[0, v)``, or ``options.ignore_index``. Another label gives a loss and gradients
            of nan.
        chunks: number of chunks; must divide ``s``, and a device's shard of it.
        weights: ``[b, s]``, multiplies the losses. None: all 1.
        options, reduction, out_axes: see `softmax_cross_entropy`.

    Returns:
        fp32 ``[b, s]``, or ``[]``. Gradients have the dtypes of ``x`` and ``kernel``; the kernel's is summed in fp32.

    Raises:
        ValueError: for shapes that do not agree, or an unknown reduction.
        TypeError: for an input or kernel that is not fp32, bf16 or fp16, or labels that are not integers.

    Source: ``megatron.core``'s fused linear cross-entropy; Wijmans et al. 2024, "Cut your losses".

    >>> loss = linear_cross_entropy(jnp.ones((1, 4, 2)), jnp.zeros((2, 8)), jnp.zeros((1, 4), int), chunks=2)
    >>> loss.shape, round(float(loss[0, 0]), 4)
    ((1, 4), 2.0794)
    """
    check_positive(chunks=chunks)
    if x.ndim != 3 or kernel.ndim != 2 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(f"x must be [b, s, h] and kernel [h, v]; got {x.shape} and {kernel.shape}")
    ranks = axis_ranks("sequence")
    if x.shape[1] % (ranks * chunks):
        over = f" on each of {ranks} context ranks" if ranks > 1 else ""
        raise ValueError(
            f"the sequence length {x.shape[1]} is not divisible by chunks {chunks}{over}; change one of them"
        )
    labels = check_labels(labels, (*x.shape[:2], kernel.shape[1]))
    losses = functools.partial(_losses, chunks)
    return reduced_loss(losses, (x, kernel), labels, weights, options, reduction, out_axes)


def _chunked(x: Array, chunks: int) -> Array:
    """Return ``[b, s, …]`` as ``[chunks, b, s / chunks, …]``, each chunk with positions of every context device."""
    # The chunks are cut within each device's shard: contiguous chunks of the whole sequence would be one device's.
    # All sizes are written out: a batch or sequence of 0 leaves none to compute.
    (b, s, *rest), ranks = x.shape, axis_ranks("sequence")
    by_device = x.reshape(b, ranks, chunks, s // (ranks * chunks), *rest)
    chunked = jnp.moveaxis(by_device, 2, 0)
    return constrain(chunked.reshape(chunks, b, s // chunks, *rest), _chunk_axes(x))


def _concatenated(chunked: Array) -> Array:
    """Return ``[b, s, …]``: the inverse of `_chunked`."""
    (chunks, b, length, *rest), ranks = chunked.shape, axis_ranks("sequence")
    by_device = chunked.reshape(chunks, b, ranks, length // ranks, *rest)
    moved = jnp.moveaxis(by_device, 0, 2)
    x = moved.reshape(b, chunks * length, *rest)
    return constrain(x, _chunk_axes(x)[1:])


def _chunk_axes(x: Array) -> LogicalAxes:
    """Return the logical axes of the chunks of ``x [b, s, …]``."""
    return (None, "batch", "sequence", *(None,) * (x.ndim - 2))


def _logits(x: Array, kernel: Array) -> Array:
    return constrain(jnp.einsum("bsh,hv->bsv", x, kernel, preferred_element_type=jnp.float32), _LOGITS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(chunks: int, options: LossOptions, x: Array, kernel: Array, labels: Array) -> Array:
    return _forward(chunks, options, x, kernel, labels)[0]


def _forward(
    chunks: int, options: LossOptions, x: Array, kernel: Array, labels: Array
) -> tuple[Array, tuple[Array, ...]]:
    # All-gathered over fsdp here, once for all chunks: inside of the loop it would be once for each.
    wide = constrain(kernel.astype(x.dtype), ("hidden", "vocab"))
    with jax.named_scope("linear_cross_entropy"):
        losses, lse = jax.lax.map(
            lambda chunk: cross_entropy_value(options, _logits(chunk[0], wide), chunk[1]),
            (_chunked(x, chunks), _chunked(labels, chunks)),
        )
    return _concatenated(losses), (x, kernel, labels, _concatenated(lse))


def _backward(chunks: int, options: LossOptions, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    x, kernel, labels, lse = saved
    wide = constrain(kernel.astype(x.dtype), ("hidden", "vocab"))

    def step(dkernel: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        x, labels, lse, g = chunk
        # In the compute dtype: the two GEMMs that read it run on tensor cores, as a linear layer's backward does.
        dlogits = cross_entropy_gradient(options, _logits(x, wide), labels, lse, g).astype(x.dtype)
        dx = jnp.einsum("bsv,hv->bsh", dlogits, wide)
        return dkernel + jnp.einsum("bsh,bsv->hv", x, dlogits, preferred_element_type=jnp.float32), dx

    with jax.named_scope("linear_cross_entropy"):
        # In fp32: a sum in half precision would lose more with every chunk.
        zero = constrain(jnp.zeros(kernel.shape, jnp.float32), ("hidden", "vocab"))
        dkernel, dx = jax.lax.scan(step, zero, tuple(_chunked(a, chunks) for a in (x, labels, lse, g)))
    return _concatenated(dx), dkernel.astype(kernel.dtype), None


_losses.defvjp(_forward, _backward)
