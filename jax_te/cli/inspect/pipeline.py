"""``jax-te inspect pipeline``: what each stage of a pipeline runs in each tick of a train step."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jax_te._text import table
from jax_te.cli.inspect.options import InspectPipeline
from jax_te.config import PipelineConfig
from jax_te.training.pipeline import Schedule, make_schedule


def run(options: InspectPipeline) -> int:
    """Return the exit status, 0, once the schedule is printed.

    Raises:
        ValueError: for numbers that do not go together.
    """
    config = PipelineConfig.parse(options.schedule)
    schedule = make_schedule(
        config.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        virtual_stages=config.virtual_stages,
    )
    if options.json:
        tasks = {name: getattr(schedule, name).tolist() for name in ("forward", "backward", "weight")}
        print(json.dumps({"ticks": schedule.ticks, "idle": schedule.bubble} | tasks, indent=2))
    else:
        print(drawn(schedule))
    return 0


def drawn(schedule: Schedule) -> str:
    """Return a schedule as text: a row for each stage, a column for each tick.

    >>> print(drawn(make_schedule("1f1b", stages=2, microbatches=2)))
    1f1b: 2 stages, 2 microbatches, 4 ticks; a stage is idle for 33.3 % of a step
    F forward pass, B backward pass, of the microbatch with this number
    <BLANKLINE>
    stage  0   1     2     3
    -----  --  ----  ----  --
    0      F0  F1    B0    B1
    1          F0B0  F1B1
    """
    words = f"{schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.ticks} ticks"
    lines = [f"{schedule.name}: {words}; a stage is idle for {100 * schedule.bubble:.1f} % of a step"]
    kinds = "F forward pass, B backward pass"
    if schedule.defers_weights:
        kinds += ", W kernel gradients"
    lines.append(f"{kinds}, of the microbatch with this number")
    if schedule.virtual_stages > 1:
        lines.append("behind the dot: the number of the stage's chunk of layers")
    rows = [[str(stage), *_cells(schedule, stage)] for stage in range(schedule.stages)]
    return "\n".join([*lines, "", table(["stage", *map(str, range(schedule.ticks))], rows)])


def _cells(schedule: Schedule, stage: int) -> Iterator[str]:
    """Yield what a stage runs in each tick, such as ``F3B1``."""
    kinds = (("F", schedule.forward), ("B", schedule.backward), ("W", schedule.weight))
    for tick in range(schedule.ticks):
        yield "".join(
            kind + _task(int(tasks[tick, stage]), schedule.virtual_stages)
            for kind, tasks in kinds
            if tasks[tick, stage] >= 0
        )


def _task(task: int, virtual_stages: int) -> str:
    microbatch, chunk = divmod(task, virtual_stages)
    return f"{microbatch}.{chunk}" if virtual_stages > 1 else str(microbatch)
