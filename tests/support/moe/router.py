"""Megatron's router in NumPy and fp64, token by token: choice, probabilities, capacity, losses, and their gradients.

Written from Megatron's formulas. Of equal values the one of the lowest index comes first, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.support.moe.options import MoEOptions

TINY = 1e-20
"""What is added to a sum of scores before scores are divided by it."""


def top(values: Sequence[float] | np.ndarray, k: int) -> list[int]:
    """Return the places of the ``k`` largest values, largest first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


# ---------------------------------------------------------------- scores: value and Jacobian of one token's row


def softmax(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    exps = np.exp(row - row.max())
    p = exps / exps.sum()
    return p, np.diag(p) - np.outer(p, p)


def sigmoid(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = 1.0 / (1.0 + np.exp(-row))
    return p, np.diag(p * (1.0 - p))


def sqrtsoftplus(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    root = np.sqrt(np.logaddexp(0.0, row))
    return root, np.diag(sigmoid(row)[0] / (2.0 * root))


def normalized(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores divided by their sum."""
    total = scores.sum() + TINY
    return scores / total, np.eye(len(scores)) / total - np.outer(scores, np.ones(len(scores))) / total**2


SCORES = {"softmax": softmax, "sigmoid": sigmoid, "sqrtsoftplus": sqrtsoftplus}


# ---------------------------------------------------------------- which experts, and how much of each


def chosen_experts(row: np.ndarray, options: MoEOptions, expert_bias: np.ndarray | None = None) -> list[int]:
    """Return the experts of a token with these logits."""
    name = options.moe_router_score_function
    values = row if name == "softmax" and not options.moe_router_pre_softmax else SCORES[name](row)[0]
    if expert_bias is not None:
        values = values + expert_bias
    if options.moe_router_group_topk:
        values = _in_best_groups(values, options)
    return top(values, options.moe_router_topk)


def _in_best_groups(values: np.ndarray, options: MoEOptions) -> np.ndarray:
    """Values with -inf in all groups but the best."""
    assert options.moe_router_num_groups is not None
    assert options.moe_router_group_topk is not None
    groups = values.reshape(options.moe_router_num_groups, -1)
    each = options.moe_router_topk // options.moe_router_group_topk
    best = top([sum(group[i] for i in top(group, each)) for group in groups], options.moe_router_group_topk)
    return np.concatenate([group if i in best else np.full_like(group, -np.inf) for i, group in enumerate(groups)])


def probabilities(row: np.ndarray, chosen: Sequence[int], options: MoEOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's probabilities ``[e]``, 0 where it is not sent, and their Jacobian ``[e, e]``."""
    e, k, name = len(row), options.moe_router_topk, options.moe_router_score_function
    if name == "softmax" and not options.moe_router_pre_softmax:
        p, jacobian = _scattered(softmax(row[list(chosen)]), chosen, e)
    else:
        scores, jacobian = SCORES[name](row)
        select = np.eye(e)[list(chosen)]
        p, jacobian = select @ scores, select @ jacobian
        if name != "softmax" and k > 1:
            p, outer = normalized(p)
            jacobian = outer @ jacobian
        p, jacobian = select.T @ p, select.T @ jacobian
    factor = options.moe_router_topk_scaling_factor or 1.0
    return p * factor, jacobian * factor


def _scattered(pair: tuple[np.ndarray, np.ndarray], chosen: Sequence[int], e: int) -> tuple[np.ndarray, np.ndarray]:
    select = np.eye(e)[list(chosen)]
    return select.T @ pair[0], select.T @ pair[1] @ select


def sinkhorn(logits: np.ndarray, tolerance: float = 1e-4) -> np.ndarray:
    """Return ``exp(logits)`` with rows and columns scaled in turn until the columns' factors stand still."""
    cost = np.exp(logits)
    rows, columns = cost.shape
    column_factors, distance = np.ones(columns), np.inf
    while distance > tolerance:
        row_factors = 1.0 / rows / ((column_factors * cost).sum(1) + 1e-8)
        before, column_factors = column_factors, 1.0 / columns / ((row_factors[:, None] * cost).sum(0) + 1e-8)
        distance = np.abs(before - column_factors).mean()
    return column_factors * cost * row_factors[:, None]


def quantiles(logits: np.ndarray, k: int, beta: np.ndarray) -> np.ndarray:
    """Return the bias of each expert under which it would get an equal share of these tokens."""
    tokens, experts = logits.shape
    shifted = logits - beta
    thresholds = np.array([row[top(row, k + 1)[-1]] for row in shifted])
    share = tokens * k // experts
    columns = (logits - thresholds[:, None]).T
    return np.array([column[top(column, share + 1)[-1]] for column in columns])


def kept_tokens(probs: np.ndarray, routed: np.ndarray, options: MoEOptions) -> np.ndarray:
    """Return which of the routed tokens ``[t, e]`` fit into the capacity of their expert."""
    tokens, experts = probs.shape
    capacity = options.capacity(tokens)
    if capacity is None:
        return routed
    order = {"probs": probs, "position": routed.astype(float)}[options.moe_token_drop_policy]
    fits = np.zeros_like(routed)
    for expert in range(experts):
        fits[top(order[:, expert], capacity), expert] = True
    return routed & fits


# ---------------------------------------------------------------- losses


def load_balancing_loss(p: np.ndarray, counts: np.ndarray, tokens: float, k: int, coefficient: float) -> float:
    """Return ``e c / (k t^2) sum_e P_e C_e`` from the scores ``p [t, e]`` and the experts' counts ``[e]``."""
    return len(counts) * coefficient / (k * tokens**2) * float(p.sum(0) @ counts)


def balance_scores(row: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of a token, of sum 1, in which load is balanced, and their Jacobian."""
    scores, jacobian = SCORES[name](row)
    if name == "softmax":
        return scores, jacobian
    scores, outer = normalized(scores)
    return scores, outer @ jacobian


@dataclass(frozen=True)
class Losses:
    """Losses, their gradient to the logits, and the counts that the global one adds to its own."""

    values: dict[str, float]
    dlogits: np.ndarray
    counts: np.ndarray


def losses(
    logits: np.ndarray,
    options: MoEOptions,
    valid: np.ndarray,
    sequences: np.ndarray,
    running: tuple[np.ndarray, int],
) -> Losses:
    """Return all losses of a microbatch.

    Args:
        logits: Logits ``[t, e]``.
        options: Types and coefficients.
        valid: False at padding ``[t]``.
        sequences: Number of each token's sequence ``[t]``.
        running: Counts of the microbatches before, of which ``global_aux_loss`` takes the mean, and how many they are.
    """
    k, e, name = options.moe_router_topk, logits.shape[1], options.moe_router_score_function
    pairs = [balance_scores(row, name) for row in logits]
    p = np.stack([pair[0] for pair in pairs]) * valid[:, None]
    routed = np.zeros_like(logits)
    for t, (scores, _) in enumerate(pairs):
        routed[t, top(scores, k)] = valid[t]
    counts, tokens, values = routed.sum(0), float(valid.sum()), {}
    dp = np.zeros_like(logits)
    for kind, coefficient in options.coefficients().items():
        factor = e * coefficient / k
        if kind == "seq_aux_loss":
            numbers = np.unique(sequences)
            length = tokens / len(numbers)  # with padding the mean one
            values[kind] = 0.0
            for number in numbers:
                own = sequences == number
                load = routed[own].sum(0)
                values[kind] += load_balancing_loss(p[own], load, length, k, coefficient) / len(numbers)
                dp[own] += factor / length**2 / len(numbers) * load
            continue
        load = counts if kind == "aux_loss" else (running[0] + counts) / (running[1] + 1)
        values[kind] = load_balancing_loss(p, load, tokens, k, coefficient)
        dp += factor / tokens**2 * load
    dlogits = np.stack([jacobian.T @ d for (_, jacobian), d in zip(pairs, dp * valid[:, None], strict=True)])
    if options.moe_z_loss_coeff is not None:
        share = options.moe_z_loss_coeff / max(tokens, 1.0)
        logsums = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
        values["z_loss"] = share * float((logsums**2 * valid).sum())
        dlogits += np.stack(
            [2 * share * z * v * softmax(row)[0] for z, v, row in zip(logsums, valid, logits, strict=True)]
        )
    return Losses(values, dlogits * (tokens if options.calculate_per_token_loss else 1.0), counts)


# ---------------------------------------------------------------- the whole router, and its state


@dataclass(frozen=True, kw_only=True)
class RouterState:
    """What a router keeps between calls. ``beta`` is the bias of quantile balancing."""

    expert_bias: np.ndarray
    beta: np.ndarray
    global_counts: np.ndarray
    global_steps: int = 0

    @classmethod
    def fresh(cls, experts: int) -> RouterState:
        return cls(expert_bias=np.zeros(experts), beta=np.zeros(experts), global_counts=np.zeros(experts))


@dataclass(frozen=True)
class Routing:
    """Results for one microbatch; ``[t, e]`` but for the counts ``[e]``."""

    probs: np.ndarray
    chosen: list[list[int]]
    routed: np.ndarray
    kept: np.ndarray
    losses: dict[str, float]
    tokens_per_expert: np.ndarray
    """What the expert bias learns from: tokens that were sent to each expert, without padding."""
    global_counts: np.ndarray
    quantiles: np.ndarray | None
    jacobians: list[np.ndarray]
    loss_dlogits: np.ndarray

    def vjp(self, dprobs: np.ndarray, loss_scale: float) -> np.ndarray:
        """Return the gradient of the logits for a gradient of the probabilities of kept tokens."""
        rows = zip(self.jacobians, dprobs * self.kept, strict=True)
        return np.stack([jacobian.T @ d for jacobian, d in rows]) + loss_scale * self.loss_dlogits


def route(
    logits: np.ndarray,
    options: MoEOptions,
    state: RouterState,
    *,
    valid: np.ndarray | None = None,
    sequences: np.ndarray | None = None,
    training: bool = True,
    replay: Sequence[Sequence[int]] | None = None,
) -> Routing:
    """Return experts, probabilities and losses of tokens with these logits ``[t, e]``.

    Args:
        logits: Logits in fp64.
        options: The layer's options.
        state: The router's state before this microbatch.
        valid: False at padding ``[t]``; None: no padding.
        sequences: Number of each token's sequence ``[t]``; None: one sequence.
        training: Whether losses and counts take part.
        replay: Experts of each token, in place of the choice by scores.
    """
    logits = np.asarray(logits, np.float64)
    tokens, experts = logits.shape
    valid = np.ones(tokens, bool) if valid is None else np.asarray(valid)
    sequences = np.zeros(tokens, int) if sequences is None else np.asarray(sequences)
    balancing, k = options.moe_router_load_balancing_type, options.moe_router_topk

    if replay is not None:
        chosen = [list(row) for row in replay]
    elif balancing == "sinkhorn":
        by = sinkhorn(logits) if training else logits
        chosen = [top(row, k) for row in by]
    elif balancing == "quantile_balancing":
        chosen = [top(row - state.beta, k) for row in logits]
    else:
        bias = state.expert_bias if options.moe_router_enable_expert_bias else None
        chosen = [chosen_experts(row, options, bias) for row in logits]

    if balancing == "sinkhorn":
        pairs = []
        for row, experts_of_row in zip(logits, chosen, strict=True):
            scores, jacobian = (sigmoid if k == 1 else softmax)(row)
            mask = np.isin(np.arange(experts), experts_of_row)
            pairs.append((scores * mask, jacobian * mask[:, None]))
    else:
        pairs = [probabilities(row, at, options) for row, at in zip(logits, chosen, strict=True)]

    probs = np.stack([pair[0] for pair in pairs])
    routed = np.zeros((tokens, experts), bool)
    for t, at in enumerate(chosen):
        routed[t, at] = True
    kept = kept_tokens(probs, routed, options)
    none = Losses({}, np.zeros_like(logits), np.zeros(experts))
    extra = none
    if training:
        extra = losses(logits, options, valid, sequences, (state.global_counts, state.global_steps))
    return Routing(
        probs=probs * kept,
        chosen=chosen,
        routed=routed,
        kept=kept,
        losses=extra.values,
        tokens_per_expert=(kept * valid[:, None]).sum(0) if training else np.zeros(experts),
        global_counts=extra.counts,
        quantiles=quantiles(logits, k, state.beta) if balancing == "quantile_balancing" and training else None,
        jacobians=[pair[1] for pair in pairs],
        loss_dlogits=extra.dlogits,
    )


def updated_expert_bias(bias: np.ndarray, counts: np.ndarray, rate: float) -> np.ndarray:
    """Return the bias after a global batch that sent ``counts [e]`` tokens to the experts."""
    return np.array([b + rate * np.sign(counts.mean() - count) for b, count in zip(bias, counts, strict=True)])


def updated_beta(beta: np.ndarray, quantiles_of: Sequence[np.ndarray], ema: float) -> np.ndarray:
    """Return the bias of quantile balancing after a global batch of microbatches with these quantiles."""
    mixed = ema * beta + (1.0 - ema) * sum(quantiles_of) / len(quantiles_of)
    return mixed - mixed.mean()
