"""Losses of a router: they reach the gradients, and never the value of the model's own loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.moe.routing import SMALLEST_SUM, ScoreFunction, largest, scores_of, tokens_per_expert
from jax_te.ops.wide import wide_dtype
from jax_te.typing import Array


def balance_scores(
    logits: Array, topk: int, score_function: ScoreFunction, counted: Array | None = None
) -> tuple[Array, Array]:
    """Return the inputs of `balance_loss`: each token's scores of all experts, and its experts by these scores.

    They ignore expert bias, groups of experts and capacity.

    Args:
        logits: ``[..., t, e]``.
        topk: ``k``.
        score_function: see `jax_te.config.RouterOptions`; sigmoid and sqrtsoftplus are divided by their sum over all
            experts.
        counted: bool ``[..., t]``, False for padding. None: all tokens count.

    Returns:
        Scores ``[..., t, e]``, 0 for tokens that do not count, and int32 ``[..., t, k]``.

    Source: ``megatron.core.transformer.moe.moe_utils.compute_routing_scores_for_aux_loss``.

    >>> balance_scores(jnp.zeros((1, 2)), 1, "sigmoid")[0].tolist()
    [[0.5, 0.5]]
    """
    scores = scores_of(logits, score_function)
    if score_function != "softmax":
        scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + SMALLEST_SUM)
    experts = largest(scores, topk)
    return scores if counted is None else jnp.where(counted[..., None], scores, 0.0), experts


def balance_loss(scores: Array, counts: Array, tokens: Array | float, topk: int) -> Array:
    """Return the load-balancing loss of each group of tokens, ``e / (k T^2) sum_e(P_e C_e)``, without its coefficient.

    ``P`` is the sum of the scores over the group's tokens, ``C`` the number of tokens that use each expert. It is 1
    where all experts have the same load.

    Args:
        scores: ``[..., t, e]`` of `balance_scores`.
        counts: ``[..., e]``, of the group, or of a larger batch, as a mean over batches of its size.
        tokens: ``T``, number of the group's tokens that count. A group without any has the loss 0.
        topk: ``k``.

    Returns:
        ``[...]``, in the dtype of the scores.

    Source: ``megatron.core.transformer.moe.moe_utils.switch_load_balancing_loss_func``; Fedus et al. 2022.

    >>> scores = jnp.array([[0.5, 0.5], [0.5, 0.5]])
    >>> balance_loss(scores, jnp.array([1.0, 1.0]), 2.0, 1).item()
    1.0
    """
    e, dtype = scores.shape[-1], scores.dtype
    tokens = jnp.maximum(jnp.asarray(tokens, dtype), 1.0)
    return jnp.sum(jnp.sum(scores, axis=-2) * counts.astype(dtype), axis=-1) * e / (topk * tokens * tokens)


def aux_loss(scores: Array, experts: Array, counted: Array | None = None) -> Array:
    """Return the mean over groups of `balance_loss`, each group by its own counts.

    Args:
        scores: ``[g, t, e]``, of the tokens of ``g`` groups.
        experts: ``[g, t, k]``.
        counted: bool ``[g, t]``. None: all tokens count.

    >>> scores, experts = balance_scores(jnp.zeros((1, 4, 2)), 1, "softmax")
    >>> aux_loss(scores, experts).item()
    1.0
    """
    counts, topk = _counts(scores, experts, counted), experts.shape[-1]
    tokens = float(scores.shape[-2]) if counted is None else jnp.sum(counts, axis=-1) / topk
    return jnp.mean(balance_loss(scores, counts, tokens, topk))


def sequence_aux_loss(scores: Array, experts: Array, counted: Array | None = None) -> Array:
    """Return `aux_loss` of sequences: each by its own counts, all with their mean number of tokens for ``T``.

    Args:
        scores: ``[..., b, s, e]``; leading axes are groups, of which the mean is taken.
        experts: ``[..., b, s, k]``.
        counted: bool ``[..., b, s]``. None: all tokens count.

    Source: ``megatron.core.transformer.moe.router.TopKRouter._apply_seq_aux_loss``; DeepSeek-AI 2024.

    >>> scores, experts = balance_scores(jnp.zeros((2, 4, 2)), 1, "softmax")
    >>> sequence_aux_loss(scores, experts).item()
    1.0
    """
    counts, topk = _counts(scores, experts, counted), experts.shape[-1]
    tokens: Array | float = float(scores.shape[-2])
    if counted is not None:
        tokens = jnp.mean(jnp.sum(counts, axis=-1) / topk, axis=-1, keepdims=True)
    return jnp.mean(balance_loss(scores, counts, tokens, topk))


def global_aux_loss(scores: Array, experts: Array, earlier: Array, counted: Array | None = None) -> tuple[Array, Array]:
    """Return `balance_loss` by the mean counts of this microbatch and those before it, and this one's counts.

    Args:
        scores: ``[t, e]``.
        experts: ``[t, k]``.
        earlier: fp32 ``[e + 1]``: the counts of the step's earlier microbatches, summed, and how many there were.
        counted: bool ``[t]``. None: all tokens count.

    Returns:
        ``[]``; fp32 ``[e + 1]``, what this microbatch adds to ``earlier``.

    Source: ``megatron.core.transformer.moe.router.TopKRouter._apply_global_aux_loss``; Qiu et al. 2025.

    >>> scores, experts = balance_scores(jnp.zeros((4, 2)), 1, "softmax")
    >>> loss, added = global_aux_loss(scores, experts, jnp.zeros(3))
    >>> loss.item(), added.tolist()
    (1.0, [4.0, 0.0, 1.0])
    """
    counts, topk = _counts(scores, experts, counted), experts.shape[-1]
    added = jnp.append(counts, 1.0)
    so_far = jax.lax.stop_gradient(earlier) + added
    tokens = float(len(scores)) if counted is None else jnp.sum(counts) / topk
    return balance_loss(scores, so_far[:-1] / so_far[-1], tokens, topk), added


def z_loss(logits: Array, counted: Array | None = None) -> Array:
    """Return the mean over groups of each group's mean ``logsumexp(logits)^2``, ``[]`` fp32, without its coefficient.

    Args:
        logits: ``[g, t, e]``.
        counted: bool ``[g, t]``. None: all tokens count. A group without any has the loss 0.

    Source: ``megatron.core.transformer.moe.moe_utils.z_loss_func``; Zoph et al. 2022.

    >>> round(z_loss(jnp.zeros((1, 4, 2))).item(), 4)
    0.4805
    """
    wide = logits.astype(wide_dtype(logits.dtype))
    squares = jnp.square(jax.nn.logsumexp(wide, axis=-1))
    if counted is None:
        return jnp.mean(squares)
    # jnp.where, not a factor 0: padding may hold nan.
    total, number = (jnp.sum(x, axis=-1) for x in (jnp.where(counted, squares, 0.0), counted.astype(squares.dtype)))
    return jnp.mean(total / jnp.maximum(number, 1.0))


def in_gradients(x: Array, loss: Array, scale: Array | float = 1.0) -> Array:
    """Return ``x``, with the gradients of ``scale * loss`` added to those that pass through it.

    Args:
        x: any array of the forward pass that the model's loss depends on.
        loss: ``[]``.
        scale: factor of the model's own loss while it is differentiated; it has no gradient.

    Source: ``megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler``.

    >>> jax.grad(lambda w: jnp.sum(in_gradients(2.0 * w, w**2)))(3.0).item()
    8.0
    """
    return _in_gradients(x, loss, jnp.asarray(scale, jnp.float32))


@jax.custom_vjp
def _in_gradients(x: Array, loss: Array, scale: Array) -> Array:
    return x


_in_gradients.defvjp(
    lambda x, loss, scale: (x, (scale, jnp.zeros((), loss.dtype))),
    lambda saved, g: (g, saved[0].astype(saved[1].dtype), None),
)


def _counts(scores: Array, experts: Array, counted: Array | None) -> Array:
    return tokens_per_expert(experts, scores.shape[-1], None if counted is None else counted[..., None])
