"""Output projection and softmax cross-entropy in one, a part of the positions at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_te.config.internal import check_positive
from jax_te.ops.loss.cross_entropy import check_labels, cross_entropy_gradient, cross_entropy_value
from jax_te.sharding import auto_region, constrain
from jax_te.sharding.internal import axis_ranks
from jax_te.typing import Array, LogicalAxes

_LOGITS: LogicalAxes = ("batch", "sequence", "vocab")


def linear_cross_entropy(
    x: Array, kernel: Array, labels: Array, *, chunks: int = 8, out_axes: LogicalAxes | None = None
) -> Array:
    """`softmax_cross_entropy` of ``x @ kernel`` without the logits ever being there as a whole.

    The sequence is taken in ``chunks`` parts, one after the other; a part's logits are fp32 and are computed again in
    backward, which costs one more product for memory of ``1 / chunks`` of the logits. The vocabulary may be split over
    the mesh's tensor axis: maxima and sums are reduced, not logits. Where context ranks split the sequence, a part has
    positions of every rank, so that none is idle and no position moves.

    Args:
        x: ``[b, s, h]`` fp32, bf16 or fp16.
        kernel: ``[h, v]``; multiplied in the dtype of ``x``.
        labels: integers ``[b, s]`` in ``[0, v)``; one outside gives a loss and gradients of nan.
        chunks: parts; must divide ``s``, and the positions of a context rank.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.

    Returns:
        fp32 ``[b, s]``. Gradients have the dtypes of ``x`` and ``kernel``; that of the kernel is summed in fp32.

    Raises:
        ValueError, TypeError: for shapes that do not go together, or labels that are no integers.

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
    return auto_region(functools.partial(_loss, chunks), out_axes)(x, kernel, labels)


def _parts(x: Array, chunks: int) -> Array:
    """``[b, s, …]`` as ``[chunks, b, s / chunks, …]``, each part with positions of every context rank."""
    of_ranks = x.reshape(x.shape[0], axis_ranks("sequence"), chunks, -1, *x.shape[2:])
    parts = jnp.moveaxis(of_ranks, 2, 0)
    return constrain(parts.reshape(*parts.shape[:2], -1, *x.shape[2:]), _part_axes(x))


def _whole(parts: Array) -> Array:
    """`_parts` undone."""
    of_ranks = parts.reshape(*parts.shape[:2], axis_ranks("sequence"), -1, *parts.shape[3:])
    moved = jnp.moveaxis(of_ranks, 0, 2)
    whole = moved.reshape(moved.shape[0], -1, *parts.shape[3:])
    return constrain(whole, _part_axes(whole)[1:])


def _part_axes(x: Array) -> LogicalAxes:
    """Logical axes of the parts of ``x [b, s, …]``."""
    return (None, "batch", "sequence", *(None,) * (x.ndim - 2))


def _logits(x: Array, kernel: Array) -> Array:
    return constrain(jnp.einsum("bsh,hv->bsv", x, kernel, preferred_element_type=jnp.float32), _LOGITS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(chunks: int, x: Array, kernel: Array, labels: Array) -> Array:
    return _forward(chunks, x, kernel, labels)[0]


def _forward(chunks: int, x: Array, kernel: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
    wide = constrain(kernel.astype(x.dtype), ("hidden", "vocab"))  # gathered over the fsdp ranks once, for all parts
    with jax.named_scope("linear_cross_entropy"):
        losses, lse = jax.lax.map(
            lambda part: cross_entropy_value(_logits(part[0], wide), part[1]),
            (_parts(x, chunks), _parts(labels, chunks)),
        )
    return _whole(losses), (x, kernel, labels, _whole(lse))


def _backward(chunks: int, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    x, kernel, labels, lse = saved
    wide = constrain(kernel.astype(x.dtype), ("hidden", "vocab"))

    def step(dkernel: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        x, labels, lse, g = part
        dlogits = cross_entropy_gradient(_logits(x, wide), labels, lse, g).astype(x.dtype)
        dx = jnp.einsum("bsv,hv->bsh", dlogits, wide)
        return dkernel + jnp.einsum("bsh,bsv->hv", x, dlogits, preferred_element_type=jnp.float32), dx

    with jax.named_scope("linear_cross_entropy"):
        zero = constrain(jnp.zeros(kernel.shape, jnp.float32), ("hidden", "vocab"))
        dkernel, dx = jax.lax.scan(step, zero, tuple(_parts(a, chunks) for a in (x, labels, lse, g)))
    return _whole(dx), dkernel.astype(kernel.dtype), None


_loss.defvjp(_forward, _backward)
