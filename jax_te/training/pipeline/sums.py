"""Sums of a stage over microbatches: losses, gradients, and maxima of quantizer states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.quantize import QuantizedKernel, merge_quantizers
from jax_te.sharding import constrain
from jax_te.training.differentiation import Gradients
from jax_te.training.kernel_gradients import SummandPlace
from jax_te.training.pipeline.around import AroundLayers
from jax_te.training.pipeline.cut import Flat
from jax_te.training.pipeline.layers import StageLayers
from jax_te.training.state import constrain_as_created
from jax_te.typing import Array


class StageSums(NamedTuple):
    """Sums of a stage over microbatches.

    Args:
        loss: sum of the losses times their weights; 0 on all stages but the last.
        weight: sum of the weights, on every stage.
        layers: sums of the gradients of the stage's layers, ``[v, ...]``, by path in a chunk; until the step's end
            ``[v, *lead, d, k, *n]`` of kernels whose gradients come as summands.
        states: maxima of the next quantizer states of the stage's layers.
        outer, outer_states: the same for the Variables around the layers.
    """

    loss: Array
    weight: Array
    layers: Flat
    states: Flat
    outer: Flat
    outer_states: Flat


class Task(NamedTuple):
    """A pass of a microbatch through a chunk of layers; the result of an idle pass is discarded.

    Args:
        counts: bool ``[]``.
        number: index of the microbatch.
        chunk: chunk of the stage.
        starts, ends: whether the embedding is in front of it, and the loss behind it.
    """

    counts: Array
    number: Array
    chunk: Array
    starts: Array
    ends: Array


class StageSummation:
    """Sums of one stage: their start, and what a pass adds to them.

    Args:
        layers: layers of the stage.
        around: parts before and after all stages' layers.
    """

    def __init__(self, layers: StageLayers, around: AroundLayers):
        self._layers, self._around, self._weighted = layers, around, around.weighted
        # In the sums, kernels have an additional axis, over the chunks.
        self._summand_places = {
            path: place._replace(lead=place.lead + 1) for path, place in layers.summand_places.items()
        }

    def start(self) -> StageSums:
        """Return sums of nothing."""
        layers, around, schedule = self._layers, self._around, self._layers.schedule
        weight = jnp.float32(schedule.microbatches) if around.weights is None else jnp.sum(around.weights)
        of_layers = _zeros(layers.params, schedule.virtual_stages)
        return StageSums(
            loss=jnp.float32(0.0),
            weight=weight,
            layers=self._constrained(self._map_summands(of_layers, lambda place, sums: place.zeros(sums.shape))),
            states=_zeros(layers.states, schedule.virtual_stages),
            outer=constrain_as_created(_zeros(around.params)),
            outer_states=_zeros(around.states),
        )

    def total(self, sums: StageSums) -> StageSums:
        """Return the sums at the end of a step, with summands added up."""
        dtype = self._layers.program.accumulation.kernels.dtype
        layers = self._map_summands(sums.layers, lambda place, summands: place.total(summands, dtype))
        return sums._replace(layers=layers)

    def add_layers(self, sums: Flat, grads: nnx.State, task: Task) -> Flat:
        """Return sums of layers' gradients with those of a pass."""
        sums = dict(sums)
        for path, grad in nnx.to_flat_state(grads):
            total = sums[path].get_value()
            added = self._weighted(grad.get_value().astype(jnp.float32), task.number)
            # jnp.where, not a factor 0: an idle pass may produce nan.
            added = jnp.where(task.counts, added, jnp.zeros_like(added))
            if added.ndim < total.ndim - 1:  # zero_bubble has summed some already
                added = self._layers.summand_places[path].with_sum(jnp.zeros_like(total[0]), added)
            sums[path] = sums[path].replace(total.at[task.chunk].add(added))
        return self._constrained(sums)

    def add_states(self, states: Flat, next_states: nnx.State, task: Task) -> Flat:
        """Return maxima of layers' quantizer states with those of a pass."""
        states = dict(states)
        for path, state in nnx.to_flat_state(next_states):
            all_chunks = states[path].get_value()
            merged = _merged(states[path].replace(all_chunks[task.chunk]), state, task.counts)
            states[path] = states[path].replace(all_chunks.at[task.chunk].set(merged))
        return states

    def add_outer(self, sums: tuple[Flat, Flat], result: Gradients, number: Array, counts: Array) -> tuple[Flat, Flat]:
        """Return sums of gradients and next states around the layers with a microbatch's, if it ``counts``."""
        outer, states = map(dict, sums)
        for path, grad in nnx.to_flat_state(result.grads):
            added = self._weighted(grad.get_value(), number)
            outer[path] = outer[path].replace(outer[path].get_value() + jnp.where(counts, added, jnp.zeros_like(added)))
        for path, state in nnx.to_flat_state(result.quantizers):
            states[path] = states[path].replace(_merged(states[path], state, counts))
        return outer, states

    def _map_summands(self, layers: Flat, fn: Callable[[SummandPlace, Array], Array]) -> Flat:
        """Return sums with ``fn`` applied to those of kernels whose gradients come as summands."""
        of_summands = {
            path: layers[path].replace(fn(place, layers[path].get_value()))
            for path, place in self._summand_places.items()
        }
        return layers | of_summands

    def _constrained(self, layers: Flat) -> Flat:
        """Return sums in the sharding that they keep."""
        others = {path: variable for path, variable in layers.items() if path not in self._summand_places}
        others = constrain_as_created(others)
        return self._map_summands(layers, lambda place, sums: constrain(sums, place.spec)) | others


def _merged(old: nnx.Variable, new: nnx.Variable, counts: Array) -> Array:
    """Return the value of a quantizer state merged with a pass's, if that ``counts``."""
    both = old.replace(jnp.stack([old.get_value(), new.get_value()]))
    return jnp.where(counts, merge_quantizers(both).get_value(), old.get_value())


def _zeros(tree: Any, chunks: int | None = None) -> Any:
    """Return fp32 zeros in the shape of Variables; with ``chunks``, of those stacked over a stage's chunks."""

    def zeros(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        # A kernel that is stored quantized has the shape of one layer's kernel, even if its arrays are stacked.
        stacked = chunks is not None and isinstance(value, QuantizedKernel)
        return variable.replace(jnp.zeros((chunks, *value.shape) if stacked else value.shape, jnp.float32))

    return jax.tree.map(zeros, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
