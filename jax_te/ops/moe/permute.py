"""The permutation of tokens into rows sorted by expert, and back: gathers of rows in both directions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te._validation import check_positive
from jax_te.ops.integers import as_int32
from jax_te.ops.moe.routing import within
from jax_te.ops.moe.row_groups import RowGroups, row_bound
from jax_te.ops.wide import wide_dtype
from jax_te.quantize import padded_size
from jax_te.typing import Array


class Permutation(NamedTuple):
    """Sources and destinations of a batch's rows. An assignment is one expert of one token, with index ``t k + slot``.

    Args:
        groups: rows of each expert; None where only the places of rows are of interest.
        sources: int32 ``[rows]``, the assignment that a row stands for; ``t k`` for padding.
        rows: int32 ``[t, k]``, the row of each assignment; the number of rows for one that is dropped.
    """

    groups: Any
    sources: Any
    rows: Any


def plan_permutation(
    experts: Array,
    num_experts: int,
    *,
    kept: Array | None = None,
    alignment: int = 1,
    capacity: int | None = None,
    pad_to_capacity: bool = False,
    bound: int | None = None,
) -> Permutation:
    """Return the permutation that sorts assignments by expert, those of one expert by token.

    Shapes depend on the sizes alone, and nothing on the order in which a device computes.

    Args:
        experts: integers ``[t, k]``; an assignment to a number outside of ``[0, e)`` is dropped.
        num_experts: ``e``.
        kept: bool ``[t, k]``, False for assignments that are dropped. None: all are kept.
        alignment: see `RowGroups`: each expert's rows begin at a multiple of it, rows between are zeros.
        capacity: the largest number of tokens that ``kept`` leaves an expert. None: any.
        pad_to_capacity: whether each expert gets ``capacity`` rows, the last of them zeros.
        bound: number of rows, if they may be fewer than what any choice of experts needs: assignments behind the last
            row are dropped. None: as many as needed.

    Raises:
        ValueError: for ``pad_to_capacity`` without a capacity, or sizes that are not positive.

    >>> plan = plan_permutation(jnp.array([[1, 0], [1, 2]]), 3, alignment=2)
    >>> plan.groups.sizes.tolist(), plan.sources.tolist(), plan.rows.tolist()
    ([1, 2, 1], [1, 4, 0, 2, 3, 4, 4, 4], [[2, 0], [3, 4]])
    """
    check_positive(num_experts=num_experts, alignment=alignment)
    if pad_to_capacity and capacity is None:
        raise ValueError("pad_to_capacity=True needs a capacity to pad to")
    experts = as_int32("experts", experts)
    there = within(experts, num_experts) if kept is None else kept & within(experts, num_experts)
    flat = jnp.where(there, experts, num_experts).reshape(-1)
    by_expert = _sorted_by_expert(flat, num_experts)
    if bound is None:
        bound = _row_count(len(flat), num_experts, alignment, capacity, pad_to_capacity)
    padded = capacity if pad_to_capacity else None
    sizes = by_expert.counts if padded is None else jnp.full_like(by_expert.counts, padded)
    groups = RowGroups(sizes=sizes, rows=bound, alignment=alignment)
    sources, rows = _places(flat, by_expert, groups)
    return Permutation(groups, sources, rows.reshape(experts.shape))


class _Sorted(NamedTuple):
    """Assignments sorted by expert, those of one expert by token.

    Args:
        order: int32 ``[t k]``, the assignments in this order; dropped ones come last.
        rank: int32 ``[t k]``, the place of each assignment in it.
        counts: int32 ``[e]``, number of assignments of each expert.
        before: int32 ``[e]``, number of assignments of the experts before it.
    """

    order: Array
    rank: Array
    counts: Array
    before: Array


def _sorted_by_expert(flat: Array, num_experts: int) -> _Sorted:
    """Return assignments sorted, of the expert of each, ``[t k]``; ``e`` for one that is dropped."""
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None], axis=0, dtype=jnp.int32)
    # Stable, so that equal experts keep the order of their tokens.
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(flat), dtype=jnp.int32), unique_indices=True)
    return _Sorted(order, rank, counts, jnp.cumsum(counts) - counts)


def _row_count(assignments: int, num_experts: int, alignment: int, capacity: int | None, pad_to_capacity: bool) -> int:
    """Return the number of rows that any choice of experts needs; arguments are those of `plan_permutation`."""
    needed = row_bound(assignments, num_experts, alignment=alignment)
    if capacity is None:
        return needed
    check_positive(capacity=capacity)
    full = num_experts * padded_size(capacity, alignment)
    return full if pad_to_capacity else min(needed, full)


def _places(flat: Array, by_expert: _Sorted, groups: RowGroups) -> tuple[Array, Array]:
    """Return the assignment of each row, int32 ``[rows]``, and the row of each assignment, int32 ``[t k]``.

    Args:
        flat: the expert of each assignment, ``e`` for one that is dropped.
        by_expert: the assignments, sorted.
        groups: rows of each expert.
    """
    order, rank, counts, before = by_expert
    num_experts, bound = len(counts), groups.rows
    group, starts = groups.of_rows(), groups.starts
    expert = jnp.minimum(group, num_experts - 1)
    offset = jnp.arange(bound, dtype=jnp.int32) - starts[expert]
    filled = (group < num_experts) & (offset < counts[expert])
    sources = jnp.where(filled, order[jnp.minimum(before[expert] + offset, len(flat) - 1)], len(flat))
    expert = jnp.minimum(flat, num_experts - 1)
    rows = jnp.where(flat < num_experts, jnp.minimum(starts[expert] + rank - before[expert], bound), bound)
    return sources, rows


def permute(x: Array, permutation: Permutation) -> Array:
    """Return the rows of tokens ``[t, ...]``, sorted by expert, ``[rows, ...]``; padding is zeros.

    Backward adds a token's gradients up in fp32, in the order of its experts.

    >>> plan = plan_permutation(jnp.array([[1], [0]]), 2)
    >>> permute(jnp.array([[1.0], [2.0]]), plan).tolist()
    [[2.0], [1.0]]
    """
    return _permute(x, permutation.sources, permutation.rows)


def unpermute(rows: Array, permutation: Permutation) -> Array:
    """Return the sum over each token's rows, ``[t, ...]`` of ``[rows, ...]``, accumulated in fp32; dropped ones give 0.

    >>> plan = plan_permutation(jnp.array([[1, 0], [0, 1]]), 2)
    >>> unpermute(jnp.array([[1.0], [2.0], [4.0], [8.0]]), plan).tolist()
    [[5.0], [10.0]]
    """
    return _unpermute(rows, permutation.sources, permutation.rows)


def permute_probs(probs: Array, permutation: Permutation) -> Array:
    """Return the probability of each row, ``[rows]``, of ``[t, k]``; 0 for padding.

    >>> permute_probs(jnp.array([[0.25, 0.75]]), plan_permutation(jnp.array([[1, 0]]), 2)).tolist()
    [0.75, 0.25]
    """
    return _permute_probs(probs, permutation.sources, permutation.rows)


def unpermute_probs(probs: Array, permutation: Permutation) -> Array:
    """Return the values ``[t, k]`` of each token's rows, ``[rows]``; 0 for dropped ones. The transpose of
    `permute_probs`.

    >>> unpermute_probs(jnp.array([0.75, 0.25]), plan_permutation(jnp.array([[1, 0]]), 2)).tolist()
    [[0.25, 0.75]]
    """
    return _unpermute_probs(probs, permutation.sources, permutation.rows)


# Each is the other's transpose, so that neither direction scatters sums in a device-dependent order.
@jax.custom_vjp
def _permute(x: Array, sources: Array, rows: Array) -> Array:
    # The source behind the last one is padding, and so is its token.
    return x.at[sources // rows.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _unpermute(y: Array, sources: Array, rows: Array) -> Array:
    wide = wide_dtype(y.dtype)
    total = sum(y.at[slot].get(mode="fill", fill_value=0).astype(wide) for slot in rows.T)
    return total.astype(y.dtype)  # type: ignore[union-attr]  # a token has at least one expert


@jax.custom_vjp
def _permute_probs(probs: Array, sources: Array, rows: Array) -> Array:
    return probs.reshape(-1).at[sources].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _unpermute_probs(probs: Array, sources: Array, rows: Array) -> Array:
    return probs.at[rows].get(mode="fill", fill_value=0)


def _transposes(forward: Any, transpose: Any) -> None:
    forward.defvjp(
        lambda x, sources, rows: (forward(x, sources, rows), (sources, rows)),
        lambda indices, g: (transpose(g, *indices), None, None),
    )


_transposes(_permute, _unpermute)
_transposes(_unpermute, _permute)
_transposes(_permute_probs, _unpermute_probs)
_transposes(_unpermute_probs, _permute_probs)
