"""Batches of a train step: their microbatches, how they are sharded, and what one hands on to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_te.quantize import added_counts, counts_within_step, with_counts
from jax_te.sharding import (
    ShardingRules,
    auto_region,
    batch_axes,
    constrain,
    current_mesh,
    current_rules,
    logical_to_spec,
    ranks_of,
    use_rules,
)
from jax_te.training.pipeline.mesh import pipeline_stages, stage_rules
from jax_te.typing import Array, PyTree


class MicrobatchStart(NamedTuple):
    """What a microbatch of a step begins with, and the one before it hands on.

    The parameters and all other quantizer states are those of the step.

    Args:
        rest: the model's other state, e.g. the counters of an ``nnx.Rngs``.
        counts: counts of the step's microbatches so far, see `jax_te.quantize.counts_within_step`.
    """

    rest: PyTree
    counts: PyTree

    @staticmethod
    def first(quantizers: PyTree, rest: PyTree) -> MicrobatchStart:
        """Return what the first microbatch of a step begins with, whose state has these parts."""
        return MicrobatchStart(rest, counts_within_step(quantizers))

    def quantizers(self, of_step: PyTree) -> PyTree:
        """Return the quantizer states that the microbatch reads."""
        return with_counts(of_step, self.counts)

    def following(self, quantizer_gradients: PyTree, rest: PyTree) -> MicrobatchStart:
        """Return what the next microbatch begins with.

        Args:
            quantizer_gradients: this microbatch's gradients of the quantizer states.
            rest: the model's other state behind it.
        """
        return MicrobatchStart(rest, added_counts(self.counts, quantizer_gradients))


def check_batch(batch: PyTree, microbatches: int) -> None:
    """Raise ValueError for a batch that a train step refuses.

    Args:
        batch: pytree of arrays ``[b, ...]``.
        microbatches: number of microbatches.

    Raises:
        ValueError: for arrays that differ in ``b``, or a ``b`` that does not divide into microbatches and over the
            mesh's batch axes.

    >>> check_batch(jnp.ones((4, 2)), 2)
    """
    with use_rules(stage_rules() if pipeline_stages() > 1 else current_rules()):
        _microbatch_size(batch, microbatches)


def rules_of(batch: PyTree) -> ShardingRules:
    """Return the rules for a batch outside of a pipeline: stages shard it, or all compute it if it does not divide."""
    mesh, rules = current_mesh(), current_rules()
    if mesh is None or pipeline_stages() == 1:
        return rules
    _, ranks = ranks_of(logical_to_spec(("batch",), mesh)[0], mesh)
    return stage_rules() if any(jnp.shape(leaf)[:1] and len(leaf) % ranks for leaf in jax.tree.leaves(batch)) else rules


def shard_batch(batch: PyTree, microbatches: int | None = None) -> PyTree:
    """Return leaves ``[b, ...]`` sharded over the batch axis; with ``microbatches``, ``[m, b / m, ...]``, each so.

    Raises:
        ValueError: see `check_batch`.
    """
    parts = microbatches or 1
    rows = _microbatch_size(batch, parts)

    def shard(leaf: Array) -> Array:
        if microbatches is None:
            return constrain(leaf, batch_axes(leaf.ndim))
        if pipeline_stages() > 1:
            # All-gathered along the pipeline axis first: XLA's partitioner warns of a reshape that would do it.
            leaf = constrain(leaf, batch_axes(leaf.ndim))
        axes = (None, *batch_axes(leaf.ndim))
        # An Explicit mesh cannot reshape a sharded axis into two, so its axes are Auto inside.
        cut = auto_region(lambda x: x.reshape(parts, rows, *x.shape[1:]), axes)
        return constrain(cut(leaf), axes)

    return jax.tree.map(shard, batch)


def _microbatch_size(batch: PyTree, parts: int) -> int:
    """Return the number of examples in each of so many parts of a batch; raises like `check_batch`."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1 or () in shapes:
        raise ValueError(f"every array of a batch must have the same leading axis, got shapes {shapes}")
    size = sizes.pop()
    if size % parts:
        raise ValueError(f"batch size {size} does not divide into microbatches={parts}; change one of them")
    mesh = current_mesh()
    if mesh is not None:
        over, ranks = ranks_of(logical_to_spec(("batch",), mesh)[0], mesh)
        if (size // parts) % ranks:
            raise ValueError(
                f"a microbatch of {size // parts} examples (batch size {size}, microbatches={parts}) does not divide "
                f"over mesh axes {over} = {ranks}; make the batch a multiple of {parts * ranks}"
            )
    return size // parts
