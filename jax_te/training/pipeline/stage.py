"""The part of a pipelined train step that one stage runs, tick by tick."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.training.pipeline.around import AroundLayers
from jax_te.training.pipeline.cut import AXIS, Flat
from jax_te.training.pipeline.layers import StageLayers
from jax_te.training.pipeline.program import Program
from jax_te.training.pipeline.residuals import Residuals
from jax_te.training.pipeline.schedule import Schedule, Slots
from jax_te.training.pipeline.sums import Summation, Sums, Task
from jax_te.typing import Array


def schedule_rows(schedule: Schedule) -> dict[str, Array]:
    """Return the schedule as arrays ``[ticks, p]``; a `Stage` runs its own column, one row a tick."""
    rows = {name: getattr(schedule, name) for name in ("forward", "backward", "weight")}
    rows |= {f"any_{name}": np.broadcast_to(rows[name].max(1, keepdims=True), rows[name].shape) for name in list(rows)}
    # Ticks in which the first stage embeds (backward), and in which the last has a loss (forward).
    last = schedule.virtual_stages - 1
    starts = (rows["backward"][:, :1] >= 0) & (rows["backward"][:, :1] % schedule.virtual_stages == 0)
    ends = (rows["forward"][:, -1:] >= 0) & (rows["forward"][:, -1:] % schedule.virtual_stages == last)
    rows |= {
        name: np.broadcast_to(row, rows["forward"].shape).astype(np.int32)
        for name, row in {"starts": starts, "ends": ends}.items()
    }
    for kind in ("inputs", "residuals", "gradients", "losses", "operands"):
        slots = getattr(schedule, kind)
        rows |= {f"{kind}_put": slots.put, f"{kind}_take": np.maximum(slots.take, 0)}
    return jax.tree.map(jnp.asarray, rows)


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


class Stage:
    """One stage of a pipelined train step, inside of a ``shard_map`` over the pipeline axis.

    Args:
        program: program of all stages.
        layers: layers of the stage.
        around: parts before and after all stages' layers.
    """

    def __init__(self, program: Program, layers: StageLayers, around: AroundLayers):
        self.program, self.schedule, self.around = program, program.schedule, around
        self.index = jax.lax.axis_index(AXIS)
        self.kept, self.summation = Residuals(layers, around.key), Summation(layers, around)

    def run(self, rows: dict[str, Array]) -> Sums:
        """Return the sums of the whole step; ``rows`` are this stage's column of `schedule_rows`, ``[ticks]``."""
        carry, _ = jax.lax.scan(lambda carry, row: (self._tick(carry, row), None), self._start(), rows)
        return self.summation.total(carry.sums)

    def _start(self) -> _Carry:
        def buffer(slots: Slots, shapes: Any) -> Any:
            return jax.tree.map(lambda shape: jnp.zeros((slots.count + 1, *shape.shape), shape.dtype), shapes)

        schedule, kept, given = self.schedule, self.kept, self.program.inputs
        return _Carry(
            inputs=buffer(schedule.inputs, given.x),
            gradients=buffer(schedule.gradients, (given.x, given.learned)),
            losses=buffer(schedule.losses, given.x),
            residuals=buffer(schedule.residuals, kept.residuals),
            operands=buffer(schedule.operands, kept.operands),
            sums=self.summation.start(),
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

    def _task(self, task: Array) -> Task:
        counts, last = task >= 0, self.schedule.virtual_stages - 1
        task = jnp.maximum(task, 0)
        number, chunk = task // self.schedule.virtual_stages, task % self.schedule.virtual_stages
        starts = counts & (self.index == 0) & (chunk == 0)
        ends = counts & (self.index == self.schedule.stages - 1) & (chunk == last)
        return Task(counts, number, chunk, starts, ends)

    def _forward(self, changed: Any, inputs: Array, row: dict[str, Array]) -> Any:
        residuals, losses, loss, outer, outer_states = changed
        _, number, chunk, starts, ends = self._task(row["forward"])
        received = _get(inputs, row["inputs_take"])
        given = self.around.stack_input(number)
        y, varying = self.kept.forward(chunk, given._replace(x=jnp.where(starts, given.x, received)))
        residuals = _put(residuals, varying, row["residuals_put"])

        def with_loss(changed: Any) -> Any:
            losses, loss, outer, outer_states = changed
            # Forward and backward at once, so that logits are not kept.
            found = self.around.loss_gradients(y, number)
            losses = _put(losses, found.inputs[0], row["losses_put"])
            added = jnp.where(ends, self.around.weighted(found.loss, number), 0.0)
            sums = self.summation.add_outer((outer, outer_states), found, number, ends)
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
        layers = self.summation.add_layers(layers, grads, task)
        states = self.summation.add_states(states, next_states, task)

        def with_embedding(changed: Any) -> Any:
            found = self.around.input_gradients(number, (dx, learned))
            return self.summation.add_outer(changed, found, number, starts)

        sums = outer, outer_states
        outer, outer_states = jax.lax.cond(row["starts"] > 0, with_embedding, lambda changed: changed, sums)
        return (layers, states, outer, outer_states, operands), (dx, learned)

    def _weight(self, layers: Flat, operands: list[Array], row: dict[str, Array]) -> Flat:
        backward_dw = jax.tree.unflatten(self.kept.later, _get(operands, row["operands_take"]))
        return self.summation.add_layers(layers, backward_dw(), self._task(row["weight"]))


def _put(buffer: Any, value: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b, v: jax.lax.dynamic_update_index_in_dim(b, v, slot, 0), buffer, value)


def _get(buffer: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)
