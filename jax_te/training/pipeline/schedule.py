"""Pipeline schedules: tables of the microbatch that each stage runs in each tick, executed by one loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_te._validation import check_choice, check_positive, checked
from jax_te.config import PIPELINE_SCHEDULES


class Slots(NamedTuple):
    """Slots of one kind of buffer on every stage.

    Args:
        count: number of slots.
        put: int32 ``[ticks, stages]``, the slot that a tick fills on a stage; ``count``, one more than there are, if
            it fills none.
        take: int32 ``[ticks, stages]``, the slot that a tick reads; -1 if it reads none.

    >>> Slots._fields
    ('count', 'put', 'take')
    """

    count: int
    put: np.ndarray
    take: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A pipeline's train step in ticks, between which neighbouring stages exchange activations and gradients.

    In a tick a stage runs at most one forward pass (F), then one backward pass (B), then the deferred kernel gradients
    of one backward pass (W). A task is the number ``microbatch * virtual_stages + chunk`` of one microbatch in one of
    the stage's chunks of layers; -1 is none.

    Args:
        name: name of the schedule.
        stages: number p of devices along the mesh's pipeline axis.
        microbatches: number m of microbatches in a step.
        virtual_stages: number v of chunks of layers on each stage. Stage ``s`` has chunks ``s``, ``s + p``,
            ``s + 2 p``, ….
        forward, backward: int32 ``[ticks, p]``, tasks.
        weight: int32 ``[ticks, p]``, tasks whose kernel gradients are computed; all -1 where these come with B.
        inputs: buffers of activations from the stage before, from their arrival to F.
        residuals: buffers of residuals, from F to B.
        gradients: buffers of gradients from the next stage, from their arrival to B.
        losses: buffers of gradients of the loss on the last stage, from F to B.
        operands: buffers of operands of kernel gradients, from B to W.

    >>> schedule = make_schedule("1f1b", stages=2, microbatches=3)
    >>> schedule.forward.T.tolist()
    [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
    >>> schedule.backward.T.tolist()
    [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
    """

    name: str
    stages: int
    microbatches: int
    virtual_stages: int
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    inputs: Slots
    residuals: Slots
    gradients: Slots
    losses: Slots
    operands: Slots

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return len(self.forward)

    @property
    def defers_weights(self) -> bool:
        """Whether kernel gradients are deferred."""
        return bool((self.weight >= 0).any())

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a stage is idle, if F, B and W take the same time.

        >>> round(make_schedule("1f1b", stages=4, microbatches=8).bubble, 3)  # 3 / 11
        0.273
        """
        # A tick is as long as its longest stage: the next one needs what its neighbours have sent.
        work = (self.forward >= 0) + (self.backward >= 0) * (1 if self.defers_weights else 2) + (self.weight >= 0)
        return float(1 - work.sum() / (work.max(axis=1).sum() * self.stages))


@checked
def make_schedule(name: str, *, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Return a schedule.

    - ``"gpipe"``: all forward passes, then all backward passes; residuals of all microbatches are in memory at once.
    - ``"1f1b"``: each stage begins a backward pass as soon as it can, so that a stage holds residuals of at most
      ``2 p - 1`` microbatches. (Stages run in step here, F and B in each tick: Megatron's, whose stages do not wait for
      one another, hold ``p`` with the same bubble.) With ``virtual_stages`` it is Megatron's interleaved schedule.
    - ``"zero_bubble"``: 1F1B with deferred kernel gradients, of at most ``2 p - 2`` microbatches at a time, which fill
      the ticks in which other stages have more to do.

    The fraction of a step in which a stage is idle is, with F, B and W of the same time and ``m`` at least ``2 p - 2``,
    ``(p - 1) / (m + p - 1)`` for the first two, ``(p - 1) / (v m + p - 1)`` interleaved, and
    ``(p - 1) / (3 m + p - 1)`` for the last.

    Args:
        name: name of the schedule, one of `PIPELINE_SCHEDULES`.
        stages: number p of stages, at least 2.
        microbatches: number m of microbatches; a multiple of ``p`` with several virtual stages.
        virtual_stages: number v of chunks of layers on each stage.

    Raises:
        ValueError: for another name, sizes that are not positive, and numbers that do not go together.

    Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient large-scale language model training on GPU
    clusters"; Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1);
    ``megatron.core.pipeline_parallel.schedules``.

    >>> make_schedule("zero_bubble", stages=4, microbatches=8).ticks
    17
    """
    check_choice(PIPELINE_SCHEDULES, schedule=name)
    check_positive(stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
    if virtual_stages > 1 and name == "zero_bubble":
        raise ValueError("zero_bubble has one chunk of layers a stage; take virtual_stages=1, or the schedule '1f1b'")
    if virtual_stages > 1 and microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of the {stages} pipeline stages with "
            f"virtual_stages={virtual_stages}; change one of them, or take virtual_stages=1"
        )
    run = _Run(stages, microbatches, virtual_stages)
    while not run.done:
        run.tick(backward=name != "gpipe" or run.all_forward, defer=name == "zero_bubble")
    return run.schedule(name)


@checked
def split_layers(num_layers: int, chunks: int, *, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Return the number of layers in each of ``chunks`` consecutive parts of a stack.

    Args:
        num_layers: number of layers in the stack.
        chunks: number of parts: stages, or stages times virtual stages.
        first, last: layers of the first and of the last part, which also have the embedding and the head. None: as many
            as any other.

    Raises:
        ValueError: if a part would have no layer.

    Source: Megatron-Core's ``num_layers_in_first_pipeline_stage`` and ``num_layers_in_last_pipeline_stage``. There the
        other stages must have the same number of layers.

    >>> split_layers(10, 4), split_layers(10, 4, last=1)
    ((3, 3, 2, 2), (3, 3, 3, 1))
    """
    check_positive(num_layers=num_layers, chunks=chunks)
    if chunks > num_layers:
        raise ValueError(f"{num_layers} layers do not split into {chunks} pipeline stages: each needs a layer")
    given = {0: first} if first is not None else {}
    if last is not None:
        given[chunks - 1] = last
    open_chunks = [chunk for chunk in range(chunks) if chunk not in given]
    rest = num_layers - sum(given.values())
    sizes = dict(given)
    for i, chunk in enumerate(open_chunks):
        sizes[chunk] = rest // len(open_chunks) + (i < rest % len(open_chunks))
    if min(sizes.values()) < 1 or sum(sizes.values()) != num_layers:
        raise ValueError(
            f"{num_layers} layers do not split into {chunks} pipeline stages with first={first}, last={last}: each "
            "needs a layer; take fewer stages, or other numbers"
        )
    return tuple(sizes[chunk] for chunk in range(chunks))


class _Run:
    """A schedule under construction: the work of each stage, tick by tick."""

    def __init__(self, stages: int, microbatches: int, virtual_stages: int):
        self.p, self.m, self.v = stages, microbatches, virtual_stages
        # In groups of p microbatches, each through all chunks: the first stage is never without work.
        order = [
            (group * self.p + i, chunk)
            for group in range(-(-self.m // self.p))
            for chunk in range(self.v)
            for i in range(min(self.p, self.m - group * self.p))
        ]
        if self.v == 1:
            order = [(i, 0) for i in range(self.m)]
        self.to_forward = [list(order) for _ in range(self.p)]
        self.to_backward = [[(i, self.v - 1 - chunk) for i, chunk in order] for _ in range(self.p)]
        # Ticks of F and B by (microbatch, stage of all p * v); of W by (microbatch, stage).
        self.forward_at: dict[tuple[int, int], int] = {}
        self.backward_at: dict[tuple[int, int], int] = {}
        self.weight_at: dict[tuple[int, int], int] = {}
        self.pending_weights: list[list[int]] = [[] for _ in range(self.p)]
        self.now = 0

    @property
    def all_forward(self) -> bool:
        return len(self.forward_at) == self.m * self.p * self.v

    @property
    def done(self) -> bool:
        return len(self.backward_at) == self.m * self.p * self.v and not any(self.pending_weights)

    def tick(self, *, backward: bool, defer: bool) -> None:
        """Run every stage for one tick.

        Args:
            backward: whether backward passes may begin.
            defer: whether their kernel gradients are deferred.
        """
        work = [0] * self.p
        for stage in range(self.p):
            queue = self.to_forward[stage]
            if queue and self._has_input(*queue[0], stage):
                microbatch, chunk = queue.pop(0)
                self.forward_at[microbatch, chunk * self.p + stage] = self.now
                work[stage] += 1
        for stage in range(self.p):
            queue = self.to_backward[stage]
            if backward and queue and self._has_gradient(*queue[0], stage):
                microbatch, chunk = queue.pop(0)
                self.backward_at[microbatch, chunk * self.p + stage] = self.now
                work[stage] += 1
                if defer:
                    self.pending_weights[stage].append(microbatch)
        if defer:
            self._run_pending_weights(work)
        self.now += 1

    def _run_pending_weights(self, work: list[int]) -> None:
        """Run a W on stages that have less to do than the busiest one; so at most 2 p - 2 are pending."""
        longest = max(work)
        # Where nothing else is left, and where every stage is busy, W is what makes the tick longer.
        if longest == 0 or min(work) == 2:
            longest += 1
        for stage, pending in enumerate(self.pending_weights):
            if pending and work[stage] < longest:
                self.weight_at[pending.pop(0), stage] = self.now

    def _has_input(self, microbatch: int, chunk: int, stage: int) -> bool:
        before = chunk * self.p + stage - 1
        return before < 0 or self.forward_at.get((microbatch, before), self.now) < self.now

    def _has_gradient(self, microbatch: int, chunk: int, stage: int) -> bool:
        at = chunk * self.p + stage
        if at == self.p * self.v - 1:
            return (microbatch, at) in self.forward_at  # the loss's gradient comes with F
        return self.backward_at.get((microbatch, at + 1), self.now) < self.now

    def schedule(self, name: str) -> Schedule:
        last = self.p * self.v - 1
        # Each use is (stage, tick that fills a slot, tick that reads it). Data sent in a tick arrive after it.
        forward, backward = self.forward_at.items(), self.backward_at.items()
        inputs = [(at % self.p, self.forward_at[i, at - 1], tick) for (i, at), tick in forward if at > 0]
        residuals = [(at % self.p, tick, self.backward_at[i, at]) for (i, at), tick in forward]
        gradients = [(at % self.p, self.backward_at[i, at + 1], tick) for (i, at), tick in backward if at < last]
        losses = [(at % self.p, self.forward_at[i, at], tick) for (i, at), tick in backward if at == last]
        operands = [(stage, self.backward_at[i, stage], tick) for (i, stage), tick in self.weight_at.items()]
        return Schedule(
            name=name,
            stages=self.p,
            microbatches=self.m,
            virtual_stages=self.v,
            forward=self._tasks(self.forward_at),
            backward=self._tasks(self.backward_at),
            weight=self._tasks(self.weight_at),
            inputs=self._slots(inputs),
            residuals=self._slots(residuals),
            gradients=self._slots(gradients),
            losses=self._slots(losses),
            operands=self._slots(operands),
        )

    def _tasks(self, ticks: dict[tuple[int, int], int]) -> np.ndarray:
        table = np.full((self.now, self.p), -1, np.int32)
        for (microbatch, at), tick in ticks.items():
            table[tick, at % self.p] = microbatch * self.v + at // self.p
        return table

    def _slots(self, uses: Sequence[tuple[int, int, int]]) -> Slots:
        free_from: list[list[int]] = [[] for _ in range(self.p)]
        rows: list[tuple[int, int, int, int]] = []
        for stage, put, take in sorted(uses, key=lambda use: use[1:]):
            free = free_from[stage]
            # After the tick that reads it: within a tick F fills its slots before B reads.
            slot = next((i for i, tick in enumerate(free) if tick < put), len(free))
            free[slot : slot + 1] = [take]
            rows.append((stage, put, take, slot))
        count = max(map(len, free_from))
        puts, takes = np.full((self.now, self.p), count, np.int32), np.full((self.now, self.p), -1, np.int32)
        for stage, put, take, slot in rows:
            puts[put, stage] = takes[take, stage] = slot
        return Slots(count, puts, takes)
