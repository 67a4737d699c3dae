"""The part of a pipelined train step that one stage runs, tick by tick."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.training.pipeline.around import AroundLayers
from jax_te.training.pipeline.cut import Flat
from jax_te.training.pipeline.layers import StageLayers
from jax_te.training.pipeline.mesh import PIPELINE_AXIS
from jax_te.training.pipeline.passes import ChunkPasses
from jax_te.training.pipeline.program import Program
from jax_te.training.pipeline.schedule import Schedule, Slots
from jax_te.training.pipeline.sums import StageSummation, StageSums, Task
from jax_te.typing import Array


class SlotRow(NamedTuple):
    """Slots of one kind of buffer that a tick fills and reads, see `Slots`; 0 where it reads none."""

    put: Array
    take: Array


class Row(NamedTuple):
    """What a stage does in a tick: arrays ``[]``; of a stage ``[ticks]``, of a schedule ``[ticks, p]``.

    Args:
        forward, backward, weight: int32, tasks, see `Schedule`; -1 is none.
        runs_forward, runs_backward: whether the stage runs the pass, if only as an idle one beside the others'.
        embeds: whether the first stage has a backward pass through the embedding in the tick.
        has_loss: whether the last stage has a forward pass with the loss in the tick.
        inputs, residuals, gradients, losses, operands: slots of the buffers.
    """

    forward: Array
    backward: Array
    weight: Array
    runs_forward: Array
    runs_backward: Array
    embeds: Array
    has_loss: Array
    inputs: SlotRow
    residuals: SlotRow
    gradients: SlotRow
    losses: SlotRow
    operands: SlotRow


def schedule_rows(schedule: Schedule) -> Row:
    """Return the schedule as arrays ``[ticks, p]``; a `Stage` runs its own column, one row a tick."""
    forward, backward = schedule.forward, schedule.backward

    def on_all(column: np.ndarray) -> Array:
        return jnp.asarray(np.broadcast_to(column, forward.shape))

    def runs(tasks: np.ndarray) -> Array:
        # Stages run the same passes in a tick, some of them idle, and the same holds for embedding and loss: a pass may
        # hold exchanges among all devices (a ring along the context axis, which would deadlock), and a tick is as long
        # as its longest stage anyway. Not so under zero_bubble, whose stages differ on purpose.
        return jnp.asarray(tasks >= 0) if schedule.defers_weights else on_all((tasks >= 0).any(1, keepdims=True))

    def slot_row(slots: Slots) -> SlotRow:
        return SlotRow(jnp.asarray(slots.put), jnp.asarray(np.maximum(slots.take, 0)))

    first, last = backward[:, :1], forward[:, -1:]
    return Row(
        forward=jnp.asarray(forward),
        backward=jnp.asarray(backward),
        weight=jnp.asarray(schedule.weight),
        runs_forward=runs(forward),
        runs_backward=runs(backward),
        embeds=on_all((first >= 0) & (first % schedule.virtual_stages == 0)),
        has_loss=on_all((last >= 0) & (last % schedule.virtual_stages == schedule.virtual_stages - 1)),
        inputs=slot_row(schedule.inputs),
        residuals=slot_row(schedule.residuals),
        gradients=slot_row(schedule.gradients),
        losses=slot_row(schedule.losses),
        operands=slot_row(schedule.operands),
    )


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
    sums: StageSums


class _Forward(NamedTuple):
    """What a forward pass changes: its buffers and sums, see `_Carry` and `StageSums`."""

    residuals: list[Array]
    losses: Array
    loss: Array
    outer: Flat
    outer_states: Flat


class _Backward(NamedTuple):
    """What a backward pass changes: its buffer and sums, see `_Carry` and `StageSums`."""

    layers: Flat
    states: Flat
    outer: Flat
    outer_states: Flat
    operands: list[Array]


class _Kept(NamedTuple):
    """Buffers that a backward pass reads, see `_Carry`."""

    residuals: list[Array]
    losses: Array
    gradients: tuple[Array, dict[str, Any]]


class Stage:
    """One stage of a pipelined train step, inside of a ``shard_map`` over the pipeline axis.

    Args:
        program: program of all stages.
        layers: layers of the stage.
        around: parts before and after all stages' layers.
    """

    def __init__(self, program: Program, layers: StageLayers, around: AroundLayers):
        self.program, self.schedule, self.around = program, program.schedule, around
        self.index = jax.lax.axis_index(PIPELINE_AXIS)
        self.passes, self.summation = ChunkPasses(layers, around.key), StageSummation(layers, around)

    def run(self, rows: Row) -> StageSums:
        """Return the sums of the whole step; ``rows`` are this stage's column of `schedule_rows`, ``[ticks]``."""
        carry, _ = jax.lax.scan(lambda carry, row: (self._tick(carry, row), None), self._start(), rows)
        return self.summation.total(carry.sums)

    def _start(self) -> _Carry:
        def buffer(slots: Slots, shapes: Any) -> Any:
            return jax.tree.map(lambda shape: jnp.zeros((slots.count + 1, *shape.shape), shape.dtype), shapes)

        schedule, passes, given = self.schedule, self.passes, self.program.inputs
        return _Carry(
            inputs=buffer(schedule.inputs, given.x),
            gradients=buffer(schedule.gradients, (given.x, given.learned)),
            losses=buffer(schedule.losses, given.x),
            residuals=buffer(schedule.residuals, passes.residuals),
            operands=buffer(schedule.operands, passes.weight_operands),
            sums=self.summation.start(),
        )

    def _tick(self, carry: _Carry, row: Row) -> _Carry:
        stages = self.schedule.stages
        sums = carry.sums
        # Each branch gets and returns what it changes, so that the compiler updates buffers in place.
        forward = _Forward(carry.residuals, carry.losses, sums.loss, sums.outer, sums.outer_states)
        y = jnp.zeros_like(carry.inputs[0])
        forward, y = jax.lax.cond(
            row.runs_forward,
            lambda forward: self._forward(forward, carry.inputs, row),
            lambda forward: (forward, y),
            forward,
        )
        y = jax.lax.ppermute(y, PIPELINE_AXIS, [(i, (i + 1) % stages) for i in range(stages)])
        inputs = _put(carry.inputs, y, row.inputs.put)

        backward = _Backward(sums.layers, sums.states, forward.outer, forward.outer_states, carry.operands)
        dx = jax.tree.map(lambda buffer: jnp.zeros_like(buffer[0]), carry.gradients)
        kept = _Kept(forward.residuals, forward.losses, carry.gradients)
        backward, dx = jax.lax.cond(
            row.runs_backward,
            lambda backward: self._backward(backward, kept, row),
            lambda backward: (backward, dx),
            backward,
        )
        dx = jax.lax.ppermute(dx, PIPELINE_AXIS, [(i, (i - 1) % stages) for i in range(stages)])
        gradients = _put(carry.gradients, dx, row.gradients.put)
        layers = backward.layers
        if self.schedule.defers_weights:
            layers = jax.lax.cond(
                row.weight >= 0,
                lambda layers: self._weight(layers, backward.operands, row),
                lambda layers: layers,
                layers,
            )
        return _Carry(
            inputs=inputs,
            gradients=gradients,
            losses=forward.losses,
            residuals=forward.residuals,
            operands=backward.operands,
            sums=StageSums(
                loss=forward.loss,
                weight=sums.weight,
                layers=layers,
                states=backward.states,
                outer=backward.outer,
                outer_states=backward.outer_states,
            ),
        )

    def _task(self, task: Array) -> Task:
        counts, last = task >= 0, self.schedule.virtual_stages - 1
        task = jnp.maximum(task, 0)
        number, chunk = task // self.schedule.virtual_stages, task % self.schedule.virtual_stages
        starts = counts & (self.index == 0) & (chunk == 0)
        ends = counts & (self.index == self.schedule.stages - 1) & (chunk == last)
        return Task(counts, number, chunk, starts, ends)

    def _forward(self, before: _Forward, inputs: Array, row: Row) -> tuple[_Forward, Array]:
        """Return what a forward pass changes, changed, and the pass's output ``[b, s, h]``."""
        _, number, chunk, starts, ends = self._task(row.forward)
        received = _get(inputs, row.inputs.take)
        given = self.around.stack_input(number)
        y, varying = self.passes.forward(chunk, given._replace(x=jnp.where(starts, given.x, received)))
        residuals = _put(before.residuals, varying, row.residuals.put)

        def with_loss(before: _Forward) -> _Forward:
            # Forward and backward at once, so that logits are not kept.
            result, dy = self.around.loss_gradients(y, number)
            losses = _put(before.losses, dy, row.losses.put)
            added = jnp.where(ends, self.around.weighted(result.loss, number), 0.0)
            outer, outer_states = self.summation.add_outer((before.outer, before.outer_states), result, number, ends)
            return before._replace(losses=losses, loss=before.loss + added, outer=outer, outer_states=outer_states)

        # Without the residuals, which the loss does not change: a branch gets and returns what it changes.
        after = jax.lax.cond(row.has_loss, with_loss, lambda before: before, before._replace(residuals=[]))
        return after._replace(residuals=residuals), y

    def _backward(self, before: _Backward, kept: _Kept, row: Row) -> tuple[_Backward, tuple[Array, dict[str, Any]]]:
        """Return what a backward pass changes, changed, and the gradients ``(x, learned)`` for the stage before."""
        task = self._task(row.backward)
        _, number, chunk, starts, ends = task
        received, learned = _get(kept.gradients, row.gradients.take)
        dy = jnp.where(ends, _get(kept.losses, row.losses.take), received)
        backward = self.passes.backward(_get(kept.residuals, row.residuals.take), chunk)
        operands = before.operands
        if self.schedule.defers_weights:
            (given,), grads, next_states, later = backward(dy)
            operands = _put(operands, jax.tree.leaves(later), row.operands.put)
        else:
            grads, next_states, given = backward(dy)
        dx, own = given
        # The next stage has added its part; the last stage has no next one.
        learned = jax.tree.map(lambda sum, part: jnp.where(ends, part, sum + part), learned, own)
        layers = self.summation.add_layers(before.layers, grads, task)
        states = self.summation.add_states(before.states, next_states, task)

        def with_embedding(sums: tuple[Flat, Flat]) -> tuple[Flat, Flat]:
            result = self.around.input_gradients(number, (dx, learned))
            return self.summation.add_outer(sums, result, number, starts)

        sums = before.outer, before.outer_states
        outer, outer_states = jax.lax.cond(row.embeds, with_embedding, lambda sums: sums, sums)
        return _Backward(layers, states, outer, outer_states, operands), (dx, learned)

    def _weight(self, layers: Flat, operands: list[Array], row: Row) -> Flat:
        backward_dw = jax.tree.unflatten(self.passes.weight_treedef, _get(operands, row.operands.take))
        return self.summation.add_layers(layers, backward_dw(), self._task(row.weight))


def _put(buffer: Any, value: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b, v: jax.lax.dynamic_update_index_in_dim(b, v, slot, 0), buffer, value)


def _get(buffer: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)
