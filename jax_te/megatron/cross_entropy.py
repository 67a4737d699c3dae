"""Megatron-Core's cross-entropy of logits whose vocabulary is sharded."""

from __future__ import annotations

from jax_te._validation import check_axes, checked
from jax_te.layers import check_tp_group
from jax_te.ops import LossOptions, softmax_cross_entropy
from jax_te.typing import Array, LogicalAxes, TensorGroup


@checked
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Array,
    target: Array,
    label_smoothing: float = 0.0,
    tp_group: TensorGroup = None,
    *,
    out_axes: LogicalAxes | None = None,
) -> Array:
    """Return `jax_te.ops.softmax_cross_entropy` of each position with Megatron's label smoothing.

    A target smoothed by ``a`` has ``1 - a`` at the label and ``a / (v - 1)`` at each other entry. ``v`` is the whole
    vocabulary, on every mesh; Megatron takes that of one tensor-parallel rank.

    Args:
        vocab_parallel_logits: ``[..., v]``, the global array: in Megatron each rank has its shard.
        target: integers ``[...]`` in ``[0, v)``; -100 gives 0, another label nan.
        label_smoothing: label smoothing in ``[0, 1 - 1 / v)``.
        tp_group: None or ``"tensor"``.
        out_axes: see `jax_te.ops.softmax_cross_entropy`.

    Returns:
        fp32 ``[...]``.

    Raises:
        ValueError, TypeError: see `jax_te.ops.softmax_cross_entropy`; for another ``tp_group`` or ``label_smoothing``.

    Source: ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``.

    >>> import jax.numpy as jnp
    >>> round(float(vocab_parallel_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]), 0.1)[0]), 4)
    1.3863
    """
    check_tp_group(tp_group)
    check_axes("vocab_parallel_logits", vocab_parallel_logits)
    v = vocab_parallel_logits.shape[-1]
    # PyTorch's formula spreads its part over the label as well, which has then 1 - a for a part of a * v / (v - 1).
    others = max(v - 1, 1)
    if not 0.0 <= label_smoothing < others / v:
        raise ValueError(
            f"label_smoothing must be in [0, {others}/{v}), of which the label keeps more than each of the {others} "
            f"other entries gets, got {label_smoothing!r}"
        )
    options = LossOptions(label_smoothing=label_smoothing * v / others)
    return softmax_cross_entropy(vocab_parallel_logits, target, options=options, out_axes=out_axes)
