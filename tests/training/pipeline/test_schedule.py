"""Schedules: what they run, when, from which buffers, and how long stages wait."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jax_te.config import PipelineConfig
from jax_te.training.pipeline import make_schedule, split_layers

SIZES = [(2, 2, 1), (2, 3, 1), (3, 8, 1), (4, 8, 1), (4, 8, 2), (2, 4, 3)]
CASES = [
    (name, *size)
    for name, size in itertools.product(("gpipe", "1f1b", "zero_bubble"), SIZES)
    if name != "zero_bubble" or size[2] == 1
]


def ticks_of(table: np.ndarray, stage: int) -> dict[int, int]:
    """The tick of each task in one stage's column."""
    return {int(task): tick for tick, task in enumerate(table[:, stage]) if task >= 0}


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_task_runs_once_behind_what_it_needs(name, p, m, v):
    schedule = make_schedule(name, stages=p, microbatches=m, virtual_stages=v)
    forward, backward, weight = (
        [ticks_of(table, stage) for stage in range(p)]
        for table in (schedule.forward, schedule.backward, schedule.weight)
    )
    for stage, microbatch, chunk in itertools.product(range(p), range(m), range(v)):
        task, place = microbatch * v + chunk, chunk * p + stage
        if place > 0:
            before = (place - 1) % p, microbatch * v + (place - 1) // p
            assert forward[stage][task] > forward[before[0]][before[1]]
        if place < p * v - 1:
            behind = (place + 1) % p, microbatch * v + (place + 1) // p
            assert backward[stage][task] > backward[behind[0]][behind[1]]
        assert backward[stage][task] >= forward[stage][task]
        if schedule.defers_weights:
            assert weight[stage][task] >= backward[stage][task]
    assert [len(column) for column in forward + backward] == [m * v] * 2 * p
    assert schedule.defers_weights == (name == "zero_bubble")


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_what_a_tick_reads_is_what_was_put_there_for_it(name, p, m, v):
    schedule = make_schedule(name, stages=p, microbatches=m, virtual_stages=v)
    for stage in range(p):
        residuals, losses, operands, inputs, gradients = {}, {}, {}, {}, {}
        for tick in range(schedule.ticks):
            f, b, w = (int(t[tick, stage]) for t in (schedule.forward, schedule.backward, schedule.weight))
            if f >= 0:
                if (stage, f % v) != (0, 0):
                    assert inputs[schedule.inputs.take[tick, stage]] == f
                residuals[schedule.residuals.put[tick, stage]] = f
                losses[schedule.losses.put[tick, stage]] = f
            if b >= 0:
                assert residuals[schedule.residuals.take[tick, stage]] == b
                last = (stage, b % v) == (p - 1, v - 1)
                held, slots = (losses, schedule.losses) if last else (gradients, schedule.gradients)
                assert held[slots.take[tick, stage]] == b
                operands[schedule.operands.put[tick, stage]] = b
            if w >= 0:
                assert operands[schedule.operands.take[tick, stage]] == w
            # What the neighbours sent in this tick arrives behind it.
            sent, place = int(schedule.forward[tick, stage - 1]), None
            if sent >= 0:
                place = sent if stage > 0 else sent + 1
                if stage > 0 or sent % v < v - 1:
                    inputs[schedule.inputs.put[tick, stage]] = place
            sent = int(schedule.backward[tick, (stage + 1) % p])
            if sent >= 0 and (stage < p - 1 or sent % v > 0):
                gradients[schedule.gradients.put[tick, stage]] = sent if stage < p - 1 else sent - 1


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_stages_wait_as_long_as_the_formulas_say(p, m):
    def bubble(name: str, v: int = 1) -> float:
        return make_schedule(name, stages=p, microbatches=m, virtual_stages=v).bubble

    assert bubble("gpipe") == bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    assert bubble("1f1b", 2) == pytest.approx((p - 1) / (2 * m + p - 1))
    assert bubble("zero_bubble") == pytest.approx((p - 1) / (3 * m + p - 1))


def test_residuals_in_memory():
    def residuals(name: str, m: int) -> int:
        return make_schedule(name, stages=4, microbatches=m).residuals.count

    assert [residuals("gpipe", m) for m in (8, 32)] == [8, 32]
    assert [residuals("1f1b", m) for m in (8, 32)] == [7, 7]
    schedule = make_schedule("zero_bubble", stages=4, microbatches=32)
    assert (schedule.residuals.count, schedule.operands.count) == (7, 6)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 32), (3, 32), (4, 8), (4, 32), (8, 64)])
def test_deferred_kernel_gradients_are_bounded(p, m):
    """At most ``2 p - 2`` are pending at once, counted from the tables alone."""
    schedule = make_schedule("zero_bubble", stages=p, microbatches=m)
    pending = np.cumsum((schedule.backward >= 0).astype(int), axis=0)
    pending[1:] -= np.cumsum((schedule.weight >= 0).astype(int), axis=0)[:-1]
    assert pending.max() <= 2 * p - 2


def test_layers_are_split():
    assert split_layers(8, 4) == (2, 2, 2, 2)
    assert split_layers(10, 4, first=1) == (1, 3, 3, 3)
    assert split_layers(6, 2, first=4, last=2) == (4, 2)
    for given in ({"num_layers": 3, "chunks": 4}, {"num_layers": 8, "chunks": 2, "first": 3, "last": 3}):
        with pytest.raises(ValueError, match="do not split into"):
            split_layers(given.pop("num_layers"), given.pop("chunks"), **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "2f2b"}, "schedule must be one of"),
        ({"stages": 0}, "stages"),
        ({"virtual_stages": 2, "microbatches": 3}, "multiple of the 2 pipeline stages"),
        ({"name": "zero_bubble", "virtual_stages": 2}, "zero_bubble has one chunk"),
    ],
)
def test_schedules_that_there_are_not(change, message):
    given = {"name": "1f1b", "stages": 2, "microbatches": 4, "virtual_stages": 1} | change
    with pytest.raises(ValueError, match=message):
        make_schedule(given.pop("name"), **given)


@pytest.mark.parametrize("text", ["", "2f2b", "1f1b,stages=2", "1f1b,virtual_stages=0", "1f1b,last_layers=x", "1f1b,,"])
def test_texts_that_are_no_configuration(text):
    with pytest.raises(ValueError, match=r"schedule|must be"):
        PipelineConfig.parse(text)
