"""The part of a pipelined train step that one stage runs, tick by tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.quantize import QuantizedKernel, merge_quantizers
from jax_te.sharding import constrain
from jax_te.training.gradients import Gradients, as_created
from jax_te.training.kernel_gradients import SummandPlace
from jax_te.training.pipeline.cut import AXIS, Flat
from jax_te.training.pipeline.loss import arrays_of
from jax_te.training.pipeline.residuals import Residuals
from jax_te.training.pipeline.schedule import Slots
from jax_te.training.pipeline.stage_model import StageModel
from jax_te.typing import Array


class Sums(NamedTuple):
    """Sums of a stage over microbatches.

    Args:
        loss: sum of the losses times their weights; 0 on all stages but the last.
        weight: sum of the weights, on every stage.
        layers: sums of the gradients of the stage's layers, ``[v, ...]`` for each position of a chunk; until the step's
            end ``[v, *lead, d, k, *n]`` of kernels whose gradients come as summands.
        states: maxima of the next quantizer states of the stage's layers.
        outer, outer_states: the same for the Variables around the stack.
    """

    loss: Array
    weight: Array
    layers: list[Flat]
    states: list[Flat]
    outer: Flat
    outer_states: Flat


class _Carry(NamedTuple):
    """Carry of a stage from tick to tick: buffers (one spare slot for idle passes) and running sums.

    Activations go from stage to stage; so do their gradients, with those of the stack's learned arguments, to which
    each stage adds its layers' part: ``(x, learned)``.
    """

    inputs: Array
    gradients: tuple[Array, dict[str, Any]]
    losses: Array
    residuals: list[Array]
    operands: list[Array]
    sums: Sums


class _Task(NamedTuple):
    """A pass of a microbatch through a chunk of layers; the result of an idle pass is discarded.

    Args:
        counts: bool ``[]``.
        number: index of the microbatch.
        chunk: chunk of the stage.
        starts, ends: the embedding is in front of it, the loss behind it.
    """

    counts: Array
    number: Array
    chunk: Array
    starts: Array
    ends: Array


class Stage:
    """One stage of a pipelined train step, inside of a ``shard_map`` over the pipeline axis.

    Args:
        model: the stage's part of the model, and its batches.
    """

    def __init__(self, model: StageModel):
        self.model, self.kept = model, Residuals(model)
        self.schedule = model.schedule
        # In the sums, kernels have an additional axis, over the chunks.
        self.places = {_place(path): place._replace(lead=place.lead + 1) for path, place in model.places.items()}

    def run(self, rows: dict[str, Array]) -> Sums:
        """Return the sums of the whole step; ``rows`` are the schedule's columns for this stage, ``[ticks]``."""
        carry, _ = jax.lax.scan(lambda carry, row: (self._tick(carry, row), None), self._start(), rows)
        layers = self._of_places(
            carry.sums.layers, lambda place, sums: place.total(sums, self.model.program.kernels.dtype)
        )
        return carry.sums._replace(layers=layers)

    def _start(self) -> _Carry:
        def buffer(slots: Slots, shapes: Any) -> Any:
            return jax.tree.map(lambda shape: jnp.zeros((slots.count + 1, *shape.shape), shape.dtype), shapes)

        schedule, kept, model = self.schedule, self.kept, self.model
        given = model.program.look.inputs
        weight = jnp.float32(schedule.microbatches) if model.weights is None else jnp.sum(model.weights)
        chunks = schedule.virtual_stages
        of_layers = _zeros(model.params, chunks), _zeros(model.states, chunks)
        layers = self._of_places(of_layers[0], lambda place, sums: place.zeros(sums.shape))
        sums = Sums(jnp.float32(0.0), weight, *of_layers, _zeros(model.outer), _zeros(model.outer_states))
        return _Carry(
            inputs=buffer(schedule.inputs, given.x),
            gradients=buffer(schedule.gradients, (given.x, given.learned)),
            losses=buffer(schedule.losses, given.x),
            residuals=buffer(schedule.residuals, kept.residuals),
            operands=buffer(schedule.operands, kept.operands),
            sums=sums._replace(layers=self._placed(layers), outer=as_created(sums.outer)),
        )

    def _tick(self, carry: _Carry, row: dict[str, Array]) -> _Carry:
        stages = self.schedule.stages
        # Stages run the same passes in a tick, some of them idle, and the same holds for embedding and loss: a pass may
        # hold exchanges among all devices (a ring along the context axis, which would deadlock), and a tick is as long
        # as its longest stage anyway. Not so under zero_bubble, whose stages differ on purpose.
        column = "{}" if self.schedule.waits else "any_{}"
        runs = {name: row[column.format(name)] >= 0 for name in ("forward", "backward")}
        # Each branch gets and returns what it changes, so that the compiler updates buffers in place.
        changed = carry.residuals, carry.losses, carry.sums.loss, carry.sums.outer, carry.sums.outer_states
        y = jnp.zeros_like(carry.inputs[0])
        changed, y = jax.lax.cond(
            runs["forward"],
            lambda changed: self._forward(changed, carry.inputs, row),
            lambda changed: (changed, y),
            changed,
        )
        residuals, losses, loss, outer, outer_states = changed
        y = jax.lax.ppermute(y, AXIS, [(i, (i + 1) % stages) for i in range(stages)])
        inputs = _put(carry.inputs, y, row["inputs_put"])

        changed = carry.sums.layers, carry.sums.states, outer, outer_states, carry.operands
        dx = jax.tree.map(lambda buffer: jnp.zeros_like(buffer[0]), carry.gradients)
        kept = residuals, losses, carry.gradients
        changed, dx = jax.lax.cond(
            runs["backward"], lambda changed: self._backward(changed, kept, row), lambda changed: (changed, dx), changed
        )
        layers, states, outer, outer_states, operands = changed
        dx = jax.lax.ppermute(dx, AXIS, [(i, (i - 1) % stages) for i in range(stages)])
        gradients = _put(carry.gradients, dx, row["gradients_put"])
        if self.schedule.waits:
            layers = jax.lax.cond(
                row["weight"] >= 0, lambda layers: self._weight(layers, operands, row), lambda layers: layers, layers
            )
        sums = Sums(loss, carry.sums.weight, layers, states, outer, outer_states)
        return _Carry(inputs, gradients, losses, residuals, operands, sums)

    def _task(self, task: Array) -> _Task:
        counts, last = task >= 0, self.schedule.virtual_stages - 1
        task = jnp.maximum(task, 0)
        number, chunk = task // self.schedule.virtual_stages, task % self.schedule.virtual_stages
        starts = counts & (self.model.index == 0) & (chunk == 0)
        ends = counts & (self.model.index == self.schedule.stages - 1) & (chunk == last)
        return _Task(counts, number, chunk, starts, ends)

    def _forward(self, changed: Any, inputs: Array, row: dict[str, Array]) -> Any:
        residuals, losses, loss, outer, outer_states = changed
        _, number, chunk, starts, ends = self._task(row["forward"])
        received = _get(inputs, row["inputs_take"])
        given = arrays_of(self.model.before(self.model.outer_model(), number))
        y, varying = self.kept.forward(chunk, given._replace(x=jnp.where(starts, given.x, received)))
        residuals = _put(residuals, varying, row["residuals_put"])

        def with_loss(changed: Any) -> Any:
            losses, loss, outer, outer_states = changed
            # Forward and backward at once, so that logits are not kept.
            found = self.model.loss_gradients(y, number)
            losses = _put(losses, found.inputs[0], row["losses_put"])
            added = jnp.where(ends, self.model.weighted(found.loss, number), 0.0)
            sums = self._add_outer((outer, outer_states), found, number, ends)
            return losses, loss + added, *sums

        changed = jax.lax.cond(row["ends"] > 0, with_loss, lambda changed: changed, (losses, loss, outer, outer_states))
        return (residuals, *changed), y

    def _backward(self, changed: Any, kept: Any, row: dict[str, Array]) -> Any:
        layers, states, outer, outer_states, operands = changed
        residuals, losses, gradients = kept
        task = self._task(row["backward"])
        _, number, chunk, starts, ends = task
        received, learned = _get(gradients, row["gradients_take"])
        dy = jnp.where(ends, _get(losses, row["losses_take"]), received)
        backward = self.kept.backward(_get(residuals, row["residuals_take"]), chunk)
        if self.schedule.waits:
            (given,), grads, next_states, later = backward(dy)
            operands = _put(operands, jax.tree.leaves(later), row["operands_put"])
        else:
            grads, next_states, given = backward(dy)
        dx, own = given
        # The next stage has added its part; the last stage has no next one.
        learned = jax.tree.map(lambda sum, part: jnp.where(ends, part, sum + part), learned, own)
        layers = self._add_layers(layers, grads, task)
        states = self._add_states(states, next_states, task)

        def with_embedding(changed: Any) -> Any:
            found = self.model.input_gradients(number, (dx, learned))
            return self._add_outer(changed, found, number, starts)

        sums = outer, outer_states
        outer, outer_states = jax.lax.cond(row["starts"] > 0, with_embedding, lambda changed: changed, sums)
        return (layers, states, outer, outer_states, operands), (dx, learned)

    def _weight(self, layers: list[Flat], operands: list[Array], row: dict[str, Array]) -> list[Flat]:
        backward_dw = jax.tree.unflatten(self.kept.later, _get(operands, row["operands_take"]))
        return self._add_layers(layers, backward_dw(), self._task(row["weight"]))

    # --- sums

    def _add_layers(self, layers: list[Flat], grads: nnx.State, task: _Task) -> list[Flat]:
        layers = [dict(position) for position in layers]
        for path, grad in nnx.to_flat_state(grads):
            j, inner = _place(path)
            total = layers[j][inner]
            added = self.model.weighted(grad.get_value().astype(jnp.float32), task.number)
            # jnp.where, not a factor 0: an idle pass may produce nan.
            added = jnp.where(task.counts, added, jnp.zeros_like(added))
            if added.ndim < total.get_value().ndim - 1:  # zero_bubble has summed some already
                added = self._as_summands(self.places[j, inner], total.get_value()[0], added)
            layers[j][inner] = total.replace(total.get_value().at[task.chunk].add(added))
        return self._placed(layers)

    def _as_summands(self, place: SummandPlace, like: Array, added: Array) -> Array:
        return place._replace(lead=place.lead - 1).with_sum(jnp.zeros_like(like), added)

    def _of_places(self, layers: list[Flat], fn: Callable[[SummandPlace, Array], Array]) -> list[Flat]:
        """Return sums with ``fn`` applied to those of kernels with deferred gradients."""
        return [
            {
                inner: var.replace(fn(place, var.get_value())) if (place := self.places.get((j, inner))) else var
                for inner, var in position.items()
            }
            for j, position in enumerate(layers)
        ]

    def _placed(self, layers: list[Flat]) -> list[Flat]:
        """Return sums in the sharding that they keep."""
        others = [
            {inner: var for inner, var in position.items() if (j, inner) not in self.places}
            for j, position in enumerate(layers)
        ]
        placed = self._of_places(layers, lambda place, sums: constrain(sums, place.spec))
        return [position | own for position, own in zip(placed, as_created(others), strict=True)]

    def _add_states(self, states: list[Flat], found: nnx.State, task: _Task) -> list[Flat]:
        states = [dict(position) for position in states]
        for path, state in nnx.to_flat_state(found):
            j, inner = _place(path)
            old = states[j][inner]
            before = old.get_value()[task.chunk]
            both = merge_quantizers(old.replace(jnp.stack([before, state.get_value()]))).get_value()
            merged = jnp.where(task.counts, both, before)
            states[j][inner] = old.replace(old.get_value().at[task.chunk].set(merged))
        return states

    def _add_outer(self, sums: Any, found: Gradients, number: Array, counts: Array) -> Any:
        """Return sums of gradients and next states around the stack with a microbatch's, if it ``counts``."""
        outer, states = map(dict, sums)
        for path, grad in nnx.to_flat_state(found.grads):
            total = outer[path]
            added = self.model.weighted(grad.get_value(), number)
            outer[path] = total.replace(total.get_value() + jnp.where(counts, added, jnp.zeros_like(added)))
        for path, state in nnx.to_flat_state(found.quantizers):
            old = states[path]
            merged = merge_quantizers(old.replace(jnp.stack([old.get_value(), state.get_value()]))).get_value()
            states[path] = old.replace(jnp.where(counts, merged, old.get_value()))
        return outer, states


def _place(path: Any) -> tuple[int, tuple[Any, ...]]:
    """Return the position of a layer in `ChunkModel`, and the path of a Variable in that layer."""
    _, position, *inner = path
    return position, tuple(inner)


def _zeros(tree: Any, chunks: int | None = None) -> Any:
    """Return fp32 zeros in the shape of Variables; with ``chunks``, of those stacked over a stage's chunks."""

    def zeros(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        # A kernel that is stored quantized has the shape of one layer's kernel, even if its arrays are stacked.
        stacked = chunks is not None and isinstance(value, QuantizedKernel)
        return variable.replace(jnp.zeros((chunks, *value.shape) if stacked else value.shape, jnp.float32))

    return jax.tree.map(zeros, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _put(buffer: Any, value: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b, v: jax.lax.dynamic_update_index_in_dim(b, v, slot, 0), buffer, value)


def _get(buffer: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)
