"""Gradients of a train step: of one batch, and their means over microbatches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te.layers import KernelCache, quantize_kernels
from jax_te.quantize import merge_quantizers
from jax_te.sharding import variable_axes
from jax_te.training.differentiation import (
    Differentiated,
    Differentiation,
    Gradients,
    differentiate,
    wide,
)
from jax_te.training.kernel_gradients import KernelGradients, Path, SummandPlace
from jax_te.training.loss import LossFn, WeightedMean
from jax_te.training.masters import full_precision
from jax_te.training.microbatches import MicrobatchStart
from jax_te.training.state import SplitModel, TrainState, constrain_as_created, split_model
from jax_te.typing import Array, DTypeLike, PyTree

_NO_CACHE = KernelCache({})


def gradients(loss_fn: LossFn, state: TrainState, batch: PyTree, key: Array, kernels: KernelGradients) -> Gradients:
    """Return loss and gradients of one batch."""
    return _of_batch(loss_fn, state, batch, key, kernels._replace(once=False), _NO_CACHE, share=1.0).gradients


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """Accumulation of a step's gradients over microbatches, in a loop or in the stages of a pipeline.

    Args:
        loss_fn: loss of a microbatch.
        microbatches: number ``m`` of microbatches.
        keep_kernels: whether kernels are quantized once a step, before the first microbatch.
        kernels: computation of the kernels' gradients; devices sum them after the last microbatch if ``kernels.once``.
    """

    loss_fn: LossFn
    microbatches: int
    keep_kernels: bool
    kernels: KernelGradients

    @property
    def share(self) -> float:
        """Factor of a microbatch's loss in the step's, see `Differentiation`."""
        return 1.0 / self.microbatches


def accumulated_gradients(accumulation: Accumulation, state: TrainState, batches: PyTree, key: Array) -> Gradients:
    """Return the means of `gradients` over microbatches, from one scan; ``batches`` has leaves ``[m, b / m, ...]``.

    Means are weighted if ``accumulation.loss_fn`` returns weights.
    """
    kernels = accumulation.kernels
    model = nnx.merge(state.graphdef, state.params, state.quantizers, state.rest)
    cached = quantize_kernels(model) if accumulation.keep_kernels else _NO_CACHE
    places, full = kernels.summand_places(model, state.params), full_precision(state.params, state.masters)
    names = dict(nnx.to_flat_state(full))

    # The carry keeps its sharding over the scan, so it starts in that of the parameters.
    zeros = wide(nnx.from_flat_state([(path, like) for path, like in names.items() if path not in places]))
    start = _Sums(
        loss=jnp.zeros((), jnp.float32),
        grads=constrain_as_created(jax.tree.map(jnp.zeros_like, zeros)),
        summands={path: place.zeros(names[path].get_value().shape) for path, place in places.items()},
        start=MicrobatchStart.first(state.quantizers, constrain_as_created(state.rest)),
    )
    sums, (stacked, weights, counts) = jax.lax.scan(
        functools.partial(_add_microbatch, accumulation, state, key, cached),
        start,
        (batches, jnp.arange(accumulation.microbatches, dtype=jnp.int32)),
    )

    grads = constrain_as_created(_summed_over_devices(sums, places, names, kernels.dtype))
    weight = None if weights is None else jnp.sum(weights)
    loss, grads = means_of_microbatches(sums.loss, grads, weight, accumulation.microbatches)
    return Gradients(loss, grads, merge_quantizers(stacked), sums.start.rest, counts)


def means_of_microbatches(loss: Array, grads: PyTree, weight: Array | None, microbatches: int) -> tuple[Array, PyTree]:
    """Return mean loss and gradients of a step.

    Args:
        loss: sum of the microbatches' losses, times their weights.
        grads: sums of gradients of each microbatch's share of the loss, 1 / m, times its weight.
        weight: sum of the weights. None: losses have no weights.
        microbatches: number ``m`` of microbatches.
    """
    if weight is None:
        return loss / microbatches, grads
    mean = WeightedMean(loss, weight).mean
    return mean, jax.tree.map(lambda total: WeightedMean(total, weight / microbatches).mean, grads)


class _Sums(NamedTuple):
    """Carry from microbatch to microbatch.

    Args:
        loss: fp32 ``[]``, sum of the losses.
        grads: sums of the gradients.
        summands: the same for kernels whose gradients devices sum after the last microbatch.
        start: state that the next microbatch begins with.
    """

    loss: Array
    grads: nnx.State
    summands: dict[Path, Array]
    start: MicrobatchStart


def _add_microbatch(
    accumulation: Accumulation,
    state: TrainState,
    key: Array,
    cached: KernelCache,
    sums: _Sums,
    microbatch: tuple[PyTree, Array],
) -> tuple[_Sums, tuple[PyTree, Array | None, PyTree]]:
    """Return sums with a microbatch's, its next quantizer states, its weight, and the counts that it began with.

    Args:
        accumulation: accumulation of the gradients.
        state: state of the run before the step.
        key: random key of the step.
        cached: quantized kernels.
        sums: sums so far.
        microbatch: the microbatch and its index.
    """
    batch, index = microbatch
    now = replace(state, quantizers=sums.start.quantizers(state.quantizers), rest=sums.start.rest)
    key = jax.random.fold_in(key, index)
    result = _of_batch(accumulation.loss_fn, now, batch, key, accumulation.kernels, cached, share=accumulation.share)
    (loss, grads, quantizers, rest, _), weight = result.gradients, result.aux
    grads = grads, result.summands
    if weight is not None:
        # Not gradients of the totals, which would be so much larger that fp16 overflows sooner.
        loss, grads = jax.tree.map(lambda mean: mean * weight, (loss, grads))
    # Each gradient is added to its sum where it is computed, so that no second copy of all gradients exists.
    loss = sums.loss + loss
    total, summands = jax.tree.map(jnp.add, (sums.grads, sums.summands), grads)
    following = sums.start.following(quantizers, rest)
    return _Sums(loss, total, summands, following), (quantizers, weight, sums.start.counts)


def _summed_over_devices(
    sums: _Sums, places: dict[Path, SummandPlace], names: dict[Path, nnx.Variable], dtype: DTypeLike
) -> nnx.State:
    """Return sums of all gradients; devices add up the summands in ``places``, once for all microbatches.

    Args:
        sums: sums over the microbatches.
        places: places of summands.
        names: Variables like the gradients, by path.
        dtype: dtype of the communicated gradients.
    """
    grads = dict(nnx.to_flat_state(sums.grads))
    for path, place in places.items():
        axes = variable_axes(names[path], names[path].get_value())
        # Where Flax's own names put a kernel, `constrain_as_created` takes it.
        wanted = None if isinstance(axes, PartitionSpec) else axes[place.lead :]
        grads[path] = names[path].replace(place.total(sums.summands[path], dtype, wanted))
    return nnx.from_flat_state(grads.items())


def _of_batch(
    loss_fn: LossFn,
    state: TrainState,
    batch: PyTree,
    key: Array,
    kernels: KernelGradients,
    cached: KernelCache,
    *,
    share: float,
) -> Differentiated:
    """Return gradients of a batch; ``aux`` is its weight, fp32 ``[]``, if the loss is a `WeightedMean`, or None.

    Args:
        loss_fn: loss of the batch.
        state: state that the batch begins with.
        batch, key: arguments of ``loss_fn``.
        kernels: computation of the kernels' gradients.
        cached: quantized kernels.
        share: factor of the loss, see `Differentiation`.
    """

    def loss_and_weight(model: Any) -> tuple[Any, Array | None]:
        loss = loss_fn(model, batch, key)
        return loss, jnp.asarray(loss.weight, jnp.float32) if isinstance(loss, WeightedMean) else None

    differentiation = Differentiation(
        rest_of=lambda model: split_model(model).rest,
        scaler=state.scaler,
        kernels=kernels,
        cached=cached,
        share=share,
        like=full_precision(state.params, state.masters),
    )
    parts = SplitModel(state.graphdef, state.params, state.quantizers, state.rest)
    return differentiate(loss_and_weight, parts, differentiation)
