"""Routing: the experts of each token, and their probabilities."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.config import RouterOptions
from jax_te.ops.integers import as_int32
from jax_te.ops.wide import wide_dtype
from jax_te.sharding import auto_region, device_mesh
from jax_te.typing import Array, DTypeLike

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
DropPolicy = Literal["probs", "position"]

SMALLEST_SUM = 1e-20
"""Constant added to the sum that divides the scores, so that all-zero scores give 0 instead of nan."""

_SINKHORN_STEPS = 100
"""Largest number of steps of `sinkhorn`."""


class Assignment(NamedTuple):
    """The experts of each token.

    Args:
        probs: ``[t, k]``, fp32 (fp64 of fp64 logits), their probabilities.
        experts: int32 ``[t, k]``, their numbers. Of experts with equal scores the lowest number comes first.
    """

    probs: Array
    experts: Array


def scores_of(logits: Array, score_function: ScoreFunction) -> Array:
    """Return the scores of all experts, in fp32 (fp64 of fp64 logits).

    Args:
        logits: ``[..., e]``.
        score_function: see `jax_te.config.RouterOptions`.

    >>> scores_of(jnp.zeros((1, 2)), "softmax").tolist()
    [[0.5, 0.5]]
    """
    wide = logits.astype(wide_dtype(logits.dtype))
    if score_function == "softmax":
        return jax.nn.softmax(wide, axis=-1)
    if score_function == "sigmoid":
        return jax.nn.sigmoid(wide)
    # The derivative of the square root is infinite at 0, where softplus underflows: such a score is 0 and stays so.
    softplus = jax.nn.softplus(wide)
    positive = softplus > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, softplus, 1.0)), 0.0)


def largest(scores: Array, count: int) -> Array:
    """Return the indices of the ``count`` largest scores of the last axis, int32; of equal ones the lowest index first.

    No gradient passes through the choice. nan counts as the smallest of all.

    >>> largest(jnp.array([1.0, 2.0, 2.0]), 2).tolist()
    [1, 2]
    """
    return _top_k(scores, count)[1]


def _top_k(scores: Array, count: int) -> tuple[Array, Array]:
    scores = jax.lax.stop_gradient(scores)
    # JAX's top_k orders -0.0 before 0.0, and nan depending on the device.
    scores = jnp.where(scores == 0.0, 0.0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    if device_mesh() is None:
        values, indices = jax.lax.top_k(scores, count)
        return values, indices.astype(jnp.int32)

    # XLA all-gathers the operand of a top-k on a mesh; a sort along an axis that is whole stays on its device.
    def by_sort(scores: Array) -> tuple[Array, Array]:
        index = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
        values, indices = jax.lax.sort((-scores, index), dimension=-1, is_stable=True, num_keys=1)
        return -values[..., :count], indices[..., :count]

    # An Explicit mesh would require that the scores' type shards the index, and not the sorted axis.
    return auto_region(by_sort, (_of_tokens(scores),) * 2)(scores)


def _of_tokens(x: Array) -> PartitionSpec:
    """Return the Explicit axes of a result ``[..., c]`` that is sharded like the tokens of ``x [..., e]``."""
    return PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None)


def choose_experts(scores: Array, options: RouterOptions) -> Array:
    """Return the ``topk`` experts with the largest scores, int32 ``[t, k]``; within the best groups, if there are any.

    Args:
        scores: ``[t, e]``.
        options: options of the router.

    >>> options = RouterOptions(num_experts=4, topk=2, num_groups=2, group_topk=1)
    >>> choose_experts(jnp.array([[0.1, 0.9, 0.2, 0.3]]), options).tolist()
    [[1, 0]]
    """
    if options.num_groups is None or options.group_topk is None:
        return largest(scores, options.topk)
    t, e = scores.shape
    grouped = scores.reshape(t, options.num_groups, e // options.num_groups)
    counted = options.group_score_topk or options.topk // options.group_topk
    of_groups = jnp.sum(_top_k(grouped, counted)[0], axis=-1)
    used = one_of_each(largest(of_groups, options.group_topk), options.num_groups)
    return largest(jnp.where(used[..., None], grouped, -jnp.inf).reshape(t, e), options.topk)


def within(experts: Array, num_experts: int) -> Array:
    """Return which numbers are those of experts, bool ``[...]``.

    >>> within(jnp.array([-1, 0, 3]), 3).tolist()
    [False, True, False]
    """
    return (experts >= 0) & (experts < num_experts)


def one_of_each(indices: Array, count: int) -> Array:
    """Return the map of chosen indices, bool ``[..., count]``, of indices ``[..., k]``.

    >>> one_of_each(jnp.array([[2, 0]]), 3).tolist()
    [[True, False, True]]
    """
    indices = as_int32("indices", indices)
    return jnp.any(indices[..., None] == _numbers(count, indices.ndim + 1), axis=-2)


def route(
    logits: Array, options: RouterOptions, *, expert_bias: Array | None = None, experts: Array | None = None
) -> Assignment:
    """Return the experts of each token and their probabilities.

    Args:
        logits: ``[t, e]``. A token with a nan among its logits has probabilities of nan, so that the loss shows it.
        options: options of the router.
        expert_bias: ``[e]``, added to the scores for the choice, and not to the probabilities.
        experts: integers ``[t, k]``, the choice made elsewhere: that of another run that is replayed, or by another
            rule. A token with a number outside of ``[0, e)`` has probabilities of nan, so that the loss shows it, and
            goes to expert 0 in its place.

    Raises:
        ValueError: for logits of another shape; a bias with a softmax; a choice of another shape.
        TypeError: for a choice that does not hold integers.

    Source: ``megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function``.

    >>> probs, experts = route(jnp.array([[1.0, 3.0, 3.0]]), RouterOptions(num_experts=3))
    >>> probs.tolist(), experts.tolist()
    ([[0.5, 0.5]], [[1, 2]])
    """
    if logits.ndim != 2 or logits.shape[1] != options.num_experts:
        raise ValueError(f"logits must be [t, {options.num_experts}], got shape {logits.shape}")
    if expert_bias is not None and options.score_function == "softmax":
        raise ValueError(
            "expert_bias is added to the scores of score_function='sigmoid' or 'sqrtsoftplus', not to a softmax"
        )
    after = options.score_function == "softmax" and not options.pre_softmax
    scores = logits.astype(wide_dtype(logits.dtype)) if after else scores_of(logits, options.score_function)
    lost = _with_nan(logits)
    if experts is None:
        experts = choose_experts(scores if expert_bias is None else scores + expert_bias[None], options)
    else:
        experts, unknown = _given_experts(experts, (len(logits), options.topk), options.num_experts)
        lost = lost | unknown
    probs = jnp.take_along_axis(scores, experts, axis=-1)
    if after:
        probs = jax.nn.softmax(probs, axis=-1)
    elif options.score_function != "softmax" and options.topk > 1:
        total = jnp.broadcast_to(jnp.sum(probs, axis=-1, keepdims=True) + SMALLEST_SUM, probs.shape)
        # XLA multiplies by the reciprocal of a broadcast divisor, unless that is hidden. For two equal scores the
        # result is 0.5 or the number below, depending on their size, and a capacity drops the tokens with the lower
        # probability.
        probs = probs / jax.lax.optimization_barrier(total)
    if options.topk_scaling_factor is not None:
        probs = probs * options.topk_scaling_factor
    return Assignment(jnp.where(lost, jnp.nan, probs), experts)


def _with_nan(logits: Array) -> Array:
    """Return which tokens have a nan among their logits, bool ``[t, 1]``.

    A nan in the score of an expert that was not chosen would go unnoticed.
    """
    return jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)


def _given_experts(experts: Array, shape: tuple[int, int], num_experts: int) -> tuple[Array, Array]:
    """Return a choice made elsewhere, int32 ``[t, k]``, and which tokens have a number that is no expert's, ``[t, 1]``.

    Such a number becomes 0. Raise ValueError for a choice of another shape.
    """
    if experts.shape != shape:
        raise ValueError(f"experts must be [t, k] = {shape}, got shape {experts.shape}")
    experts = as_int32("experts", experts)
    there = within(experts, num_experts)
    return jnp.where(there, experts, 0), ~jnp.all(there, axis=-1, keepdims=True)


def route_by_sinkhorn(
    logits: Array, topk: int, *, balanced: bool, experts: Array | None = None, tol: float = 1e-4
) -> Assignment:
    """Return an assignment that gives all experts about as many tokens, as an optimal transport would.

    Args:
        logits: ``[t, e]``. A token with a nan among its logits has probabilities of nan, so that the loss shows it.
        topk: ``k``.
        balanced: whether to choose by `sinkhorn`'s matrix, as in training. False: by the logits, as in evaluation,
            where a token's experts may not depend on the others.
        experts: integers ``[t, k]``, a choice made elsewhere, which replaces that by the matrix; see `route`.
        tol: tolerance of `sinkhorn`.

    Returns:
        The assignment; its probabilities, also those of a given choice, are the sigmoid of the logits for ``topk = 1``,
        else their softmax over all experts.

    Raises:
        ValueError: for a given choice of another shape.
        TypeError: for a given choice that does not hold integers.

    Source: ``megatron.core.transformer.moe.router.TopKRouter.sinkhorn_load_balancing``; Clark et al. 2022.

    >>> route_by_sinkhorn(jnp.array([[2.0, 0.0], [1.0, 0.0]]), 1, balanced=True).experts.tolist()
    [[0], [1]]
    """
    scores, lost = scores_of(logits, "sigmoid" if topk == 1 else "softmax"), _with_nan(logits)
    if experts is None:
        wide = jax.lax.stop_gradient(logits.astype(wide_dtype(logits.dtype)))
        experts = largest(sinkhorn(wide, tol=tol) if balanced else wide, topk)
    else:
        experts, unknown = _given_experts(experts, (len(logits), topk), logits.shape[1])
        lost = lost | unknown
    return Assignment(jnp.where(lost, jnp.nan, jnp.take_along_axis(scores, experts, axis=-1)), experts)


def sinkhorn(logits: Array, *, tol: float = 1e-4) -> Array:
    """Return ``exp(logits)``, rows and columns scaled in turn until their sums are equal, ``[t, e]``.

    A row's maximum is subtracted first, which its factor absorbs: logits of any size are balanced. A row without a
    finite maximum makes the result nan.

    The iteration ends after 100 steps at the latest, and the result is what it has then. Normal logits with a standard
    deviation of up to 10 take 2 to 40. Only where an expert's logits are about 10 or more below all others does its
    factor grow slowly, for thousands of steps or without an end: after 100 that expert still has less than its share.

    Args:
        logits: ``[t, e]``, fp32.
        tol: the mean change of the columns' factors below which the iteration ends. It ends also at nan.

    Source: ``megatron.core.transformer.moe.moe_utils.sinkhorn``; Sinkhorn and Knopp 1967.

    >>> jnp.sum(sinkhorn(jnp.array([[1.0, 0.0], [1.0, 0.5]])), axis=0).round(2).tolist()
    [0.5, 0.5]
    """
    run = functools.partial(_sinkhorn, tol=tol)
    # The loop carries factors of rows and columns, whose types would change on an Explicit mesh.
    return auto_region(run, jax.typeof(logits).sharding.spec)(logits)


class _Factors(NamedTuple):
    """Factors of rows ``[t]`` and columns ``[e]`` after so many steps, and the columns' mean change in the last."""

    rows: Array
    columns: Array
    change: Array
    steps: Array


def _sinkhorn(logits: Array, *, tol: float) -> Array:
    t, e = logits.shape
    eps = 1e-8
    largest_of_row = jnp.max(logits, axis=1)
    cost = jnp.exp(logits - largest_of_row[:, None])
    # Megatron's eps beside the sums of the rows as they were. Limited, so that rows of very negative logits, whose
    # factors it makes vanish, stay finite.
    eps_of_row = eps * jnp.exp(jnp.minimum(-largest_of_row, 80.0))

    def step(state: _Factors) -> _Factors:
        rows = 1.0 / t / (jnp.sum(state.columns[None] * cost, axis=1) + eps_of_row)
        columns = 1.0 / e / (jnp.sum(rows[:, None] * cost, axis=0) + eps)
        return _Factors(rows, columns, jnp.mean(jnp.abs(state.columns - columns)), state.steps + 1)

    start = _Factors(
        rows=jnp.ones(t, cost.dtype),
        columns=jnp.ones(e, cost.dtype),
        change=jnp.full((), jnp.inf, cost.dtype),
        steps=jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(lambda state: (state.change > tol) & (state.steps < _SINKHORN_STEPS), step, start)
    return end.columns[None] * cost * end.rows[:, None]


def expert_quantiles(logits: Array, bias: Array, topk: int) -> Array:
    """Return the bias of each expert with which it would get ``t k / e`` tokens, fp32 ``[e]``, without a gradient.

    The choice is by ``logits - bias``; each token's threshold is computed with the present biases.

    Args:
        logits: ``[t, e]``.
        bias: ``[e]``, fp32.
        topk: ``k``.

    Raises:
        ValueError: if ``t k`` is not a multiple of ``e``; if a token uses all experts, so that none is left out.

    Source: ``megatron.core.transformer.moe.moe_utils.qb_dual_update``.

    >>> expert_quantiles(jnp.array([[2.0, 0.0], [1.0, 0.0]]), jnp.zeros(2), 1).tolist()
    [1.0, 0.0]
    """
    t, e = logits.shape
    if topk >= e:
        raise ValueError(f"quantile balancing chooses topk {topk} of the num_experts {e}: it must be fewer")
    if t * topk % e:
        raise ValueError(
            f"quantile balancing gives each expert the same number of tokens: {t} tokens times topk {topk} is not a "
            f"multiple of num_experts {e}"
        )
    scores = jax.lax.stop_gradient(logits.astype(jnp.float32))
    threshold = _top_k(scores - bias[None], topk + 1)[0][:, -1:]
    return _top_k((scores - threshold).T, t * topk // e + 1)[0][:, -1]


def expert_capacity(tokens: int, num_experts: int, topk: int, factor: float) -> int:
    """Return the capacity of an expert in tokens, ``ceil(tokens k / e * factor)``, at most all tokens.

    Raises:
        ValueError: for a factor that gives a capacity of 0.

    >>> expert_capacity(64, 8, 2, 1.25)
    20
    """
    wanted = tokens * topk / num_experts * factor
    capacity = tokens if wanted >= tokens else math.ceil(wanted)
    if capacity < 1:
        raise ValueError(f"capacity_factor {factor!r} leaves experts without any token; give one above 0, or None")
    return capacity


def within_capacity(assignment: Assignment, num_experts: int, capacity: int, policy: DropPolicy) -> Array:
    """Return the map of tokens that each expert has room for, bool ``[t, e]``.

    Each expert has exactly ``capacity`` tokens in it, those that chose it before others: ``map & chosen`` is what an
    expert computes.

    Args:
        assignment: choice of experts for the tokens.
        num_experts: ``e``.
        capacity: result of `expert_capacity`, at most the number of tokens.
        policy: rule by which an expert selects the tokens that it keeps: ``"probs"``, those with its largest
            probabilities; ``"position"``, the first ones. Ties go to the first token.

    Source: ``megatron.core.transformer.moe.moe_utils.apply_router_token_dropping``.

    >>> assignment = Assignment(jnp.array([[0.4], [0.6]]), jnp.zeros((2, 1), jnp.int32))
    >>> within_capacity(assignment, 1, 1, "probs").tolist()
    [[False], [True]]
    """
    probs, experts = assignment
    t, chosen = len(probs), one_of_each(experts, num_experts)
    # No gradient from here on: a token is kept or dropped.
    first = chosen if policy == "position" else dense_probs(jax.lax.stop_gradient(assignment), num_experts)
    kept = largest(first.T.astype(jnp.float32 if policy == "position" else probs.dtype), capacity)
    # Not by `one_of_each`, which compares every index with every number: here there are as many numbers as tokens.
    rows = jnp.arange(num_experts, dtype=kept.dtype)[:, None]
    return jnp.zeros((num_experts, t), bool).at[rows, kept].set(True, unique_indices=True).T


def dense_probs(assignment: Assignment, num_experts: int) -> Array:
    """Return the probabilities ``[t, e]``, 0 for experts that a token does not use: Megatron's form.

    >>> dense_probs(Assignment(jnp.array([[0.25]]), jnp.array([[1]])), 2).tolist()
    [[0.0, 0.25]]
    """

    def scatter(probs: Array, experts: Array) -> Array:
        rows = jnp.arange(len(probs), dtype=experts.dtype)[:, None]
        return jnp.zeros((len(probs), num_experts), probs.dtype).at[rows, experts].set(probs, unique_indices=True)

    return auto_region(scatter, _of_tokens(assignment.probs))(*assignment)


def tokens_per_expert(experts: Array, num_experts: int, counted: Array | None = None) -> Array:
    """Return the number of tokens that use each expert, fp32 ``[..., e]``, of ``[..., t, k]``.

    Args:
        experts: int, ``[..., t, k]``.
        num_experts: ``e``.
        counted: bool ``[..., t, k]``, or ``[..., t, 1]`` for whole tokens: which of them count. None: all.

    >>> tokens_per_expert(jnp.array([[0, 2], [2, 1]]), 3).tolist()
    [1.0, 1.0, 2.0]
    """
    experts = as_int32("experts", experts)
    hits = experts[..., None] == _numbers(num_experts, experts.ndim + 1)
    if counted is not None:
        hits = hits & counted[..., None]
    return jnp.sum(hits, axis=(-3, -2), dtype=jnp.float32)


def balanced_at_random(logits: Array, key: Array) -> Array:
    """Return normal random logits, whose gradient goes to ``logits``, for measurements under equal load.

    Source: ``megatron.core.transformer.moe.moe_utils.apply_random_logits``.

    >>> balanced_at_random(jnp.zeros((2, 4)), jax.random.key(0)).shape
    (2, 4)
    """
    return _in_place_of(logits, jax.random.normal(key, logits.shape, logits.dtype))


def biased_at_random(logits: Array, std: float, key: Array, bias_key: Array) -> Array:
    """Return `balanced_at_random`, plus the same normal random bias for all tokens: for measurements under uneven load.

    Args:
        logits: ``[..., e]``.
        std: standard deviation of the bias.
        key: random key of the logits.
        bias_key: random key of the bias.

    Source: ``megatron.core.transformer.moe.moe_utils.apply_biased_logits``.

    >>> biased_at_random(jnp.zeros((2, 4)), 1.0, jax.random.key(0), jax.random.key(1)).shape
    (2, 4)
    """
    bias = std * jax.random.normal(bias_key, logits.shape[-1:], logits.dtype)
    return balanced_at_random(logits, key) + jnp.expand_dims(bias, range(logits.ndim - 1))


def jitter_factors(shape: tuple[int, ...], dtype: DTypeLike, eps: float, key: Array) -> Array:
    """Return uniform random factors in ``[1 - eps, 1 + eps]`` for a router's input.

    Source: ``megatron.core.transformer.moe.router.TopKRouter.apply_input_jitter``; Fedus et al. 2022.

    >>> jitter_factors((2,), jnp.float32, 0.0, jax.random.key(0)).tolist()
    [1.0, 1.0]
    """
    return jax.random.uniform(key, shape, dtype, 1.0 - eps, 1.0 + eps)


@jax.custom_vjp
def _in_place_of(x: Array, value: Array) -> Array:
    return value


_in_place_of.defvjp(lambda x, value: (value, None), lambda _, g: (g, None))


def _numbers(count: int, ndim: int) -> Array:
    """Return 0, …, ``count - 1`` along the last of ``ndim`` axes."""
    return jnp.expand_dims(jnp.arange(count, dtype=jnp.int32), range(ndim - 1))
