"""Selection of the tokens that count in a loss, and reduction of their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jax_te._validation import FLOAT_DTYPES, check_annotations, check_float, check_rate, checked
from jax_te.ops.integers import as_int32
from jax_te.sharding import auto_region
from jax_te.typing import Array, LogicalAxes

Reduction = Literal["none", "sum", "mean"]
"""What becomes of the losses of all tokens, see `jax_te.ops.softmax_cross_entropy`."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of a cross-entropy.

    Args:
        ignore_index: a label whose token adds no loss, no gradient and no part of a mean. None: there is no such label.
        label_smoothing: part of the target, in [0, 1), that is spread evenly over all ``v`` entries, the label's among
            them, as in PyTorch and Transformer Engine. `jax_te.megatron.vocab_parallel_cross_entropy` has Megatron's
            formula, which spreads it over the other ``v - 1``.

    Raises:
        ValueError: for an ``ignore_index`` that is not an int32, or another ``label_smoothing``.

    >>> LossOptions(label_smoothing=0.1).ignore_index
    -100
    """

    ignore_index: int | None = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        index = self.ignore_index
        # bool is a subclass of int: True would pass as 1.
        if index is not None and (type(index) is not int or not -(2**31) <= index < 2**31):
            raise ValueError(f"ignore_index must be an int32, as labels are, or None, got {index!r}")
        check_annotations(self, LossOptions)
        check_rate(label_smoothing=self.label_smoothing)

    @checked
    def ignored(self, labels: Array) -> Array:
        """Return bool ``[...]``, which of the labels ``[...]`` are ignored."""
        labels = as_int32("labels", labels)
        return jnp.zeros(labels.shape, bool) if self.ignore_index is None else labels == self.ignore_index


def reduced_loss(
    losses: Callable[..., Array],
    arrays: tuple[Array, ...],
    labels: Array,
    weights: Array | None,
    options: LossOptions,
    reduction: Reduction,
    out_axes: LogicalAxes | None,
) -> Array:
    """Return ``losses(options, *arrays, labels)`` times the weights, or their sum or mean over the whole arrays.

    Args:
        losses: function that returns losses in fp32, of the labels' shape, 0 where a label is ignored.
        arrays: arrays such as logits; their dtypes are those of the computation.
        labels, weights, options, reduction, out_axes: see `softmax_cross_entropy`.

    Raises:
        ValueError: for weights that do not have the labels' shape.
        TypeError: for arrays that are not fp32, bf16 or fp16.
    """
    check_float("a cross-entropy", *arrays, allowed=FLOAT_DTYPES)
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must have the shape of the labels {labels.shape}, got {weights.shape}")

    def reduced(arrays: tuple[Array, ...], labels: Array, weights: Array | None) -> Array:
        each = losses(options, *arrays, labels)
        # Weights of ignored tokens are not read: they may be anything.
        counted = jnp.where(options.ignored(labels), 0.0, 1.0 if weights is None else weights.astype(jnp.float32))
        each = each if weights is None else each * counted
        if reduction == "none":
            return each
        # The divisor is replaced before the division, not the quotient after it: 0 / 0 would make the gradient nan.
        count = jnp.sum(counted)
        return jnp.sum(each) / (1.0 if reduction == "sum" else jnp.where(count == 0.0, 1.0, count))

    # On a mesh the compiler reduces over all devices, whatever the sharding of the losses.
    return auto_region(reduced, out_axes if reduction == "none" else ())(arrays, labels, weights)
