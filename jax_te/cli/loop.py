"""The training loop: steps, records, held-out losses, checkpoints, and an orderly end on SIGTERM or Ctrl-C."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from jax_te.metrics import MetricsLog, Progress
from jax_te.typing import PyTree

PATIENCE = 50
"""Steps in a row without a finite loss after which a run is given up."""


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How long a run lasts and what happens how often, in steps.

    Args:
        steps: the run ends after this step.
        save_every, eval_every: checkpoints and held-out losses; both also come at the end.
        log_every: lines and TensorBoard points. ``metrics.jsonl`` has every step.
        inspect_every: steps that are inspected; 0 for none.
        tokens_per_step: for the speed.
    """

    steps: int
    save_every: int
    eval_every: int
    log_every: int
    tokens_per_step: int
    inspect_every: int = 0


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What a run came to.

    Args:
        state: the last state.
        step: the last step done.
        stopped_by: the signal that ended the run early, or None.
        heldout_loss: of the last state if it was computed in this run, else None.
        seconds: wall time of the loop.
        tokens_per_second: mean without the first step, which compiles; None for fewer than two steps.
    """

    state: PyTree
    step: int
    stopped_by: signal.Signals | None
    heldout_loss: float | None
    seconds: float
    tokens_per_second: float | None


class StopRequest:
    """While entered, the first SIGTERM or SIGINT is kept in `signal`, with a line on stderr; the second acts as usual.

    Outside the main thread, where Python gives no signals, it does nothing.

    >>> with StopRequest() as stop:
    ...     stop.signal is None
    True
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number)
        self._restore()
        line = f"\njax-te: {self.signal.name}: finishing this step and saving; once more to stop at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())  # print() must not be used in a handler: it may have been interrupted itself


def run_loop(
    state: PyTree,
    *,
    step_fn: Callable[[PyTree, Any], tuple[PyTree, dict[str, Any]]],
    batches: Iterator[Any],
    first: int,
    plan: LoopPlan,
    log: MetricsLog,
    evaluate: Callable[[PyTree], float],
    save: Callable[[int, PyTree], None],
    progress: Progress,
    learning_rates: Sequence[float] = (),
    skipped: int = 0,
    inspect: Callable[[int, PyTree, Any], None] | None = None,
) -> LoopResult:
    """Run steps ``first + 1 … plan.steps``.

    The numbers of a step are read one step late, so that a device is never kept waiting for the host. In step order
    the log gets each step's record, then its held-out loss, and only then its checkpoint is written: what is on disk
    after a crash is never behind the checkpoint.

    Args:
        state: the state after step ``first``.
        step_fn: ``(state, batch) -> (state, metrics)``, metrics being scalars with a ``"loss"``.
        batches: what the steps get, in order.
        first: steps done already.
        plan: see `LoopPlan`.
        log: gets the records.
        evaluate: held-out loss of a state.
        save: writes a checkpoint; may return before it is on disk.
        progress: shows the run.
        learning_rates: recorded with the steps: the rate of each update, from the first of all.
        skipped: steps before ``first`` that made no update.
        inspect: called before a step with its number, the state it starts from and its batch.

    Raises:
        ValueError: after `PATIENCE` steps in a row whose loss was not finite.
    """
    recorder = _Recorder(plan, log, progress, learning_rates, skipped)
    pending: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

    def drain(keep: int) -> None:
        while len(pending) > keep:
            recorder.record(*pending.popleft())

    heldout, stopped_by, step, begin = None, None, first, time.perf_counter()
    progress.start(first, plan.steps, plan.tokens_per_step)
    try:
        with StopRequest() as stop:
            while step < plan.steps and stopped_by is None:
                step, batch = step + 1, next(batches)
                if inspect is not None and plan.inspect_every and step % plan.inspect_every == 0:
                    drain(0)
                    recorder.pause(inspect, step, state, batch)
                state, metrics = step_fn(state, batch)
                pending.append((step, metrics))
                drain(1)
                last = step == plan.steps
                stopped_by = stop.signal  # looked at once a step: what stops the loop has also saved it
                heldout = None
                if last or step % plan.eval_every == 0:
                    drain(0)
                    heldout = recorder.pause(evaluate, state)
                    log.write(step, {"heldout_loss": heldout})
                if last or step % plan.save_every == 0 or stopped_by is not None:
                    drain(0)
                    log.sync()
                    recorder.pause(save, step, state)
    finally:
        progress.stop()
    return LoopResult(
        state=state,
        step=step,
        stopped_by=stopped_by,
        heldout_loss=heldout,
        seconds=time.perf_counter() - begin,
        tokens_per_second=recorder.tokens_per_second,
    )


class _Recorder:
    """Turns a step's device scalars into a record, a progress update and a speed."""

    def __init__(self, plan: LoopPlan, log: MetricsLog, progress: Progress, rates: Sequence[float], skipped: int):
        self._plan, self._log, self._progress = plan, log, progress
        self._rates, self._skipped = rates, skipped
        self._previous: float | None = None  # when the step before was seen; None before the first, which compiles
        self._busy = 0.0
        self._timed = 0
        self._bad = 0

    @property
    def tokens_per_second(self) -> float | None:
        return self._timed * self._plan.tokens_per_step / self._busy if self._busy else None

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        values = {"loss": values.pop("loss"), **values}
        update = step - 1 - self._skipped
        if update < len(self._rates):
            values["learning_rate"] = float(self._rates[update])
        self._skipped += values.get("skipped", 0.0) > 0.0
        now = time.perf_counter()
        if self._previous is not None:
            self._busy += now - self._previous
            self._timed += 1
            values["tokens_per_second"] = round(self._plan.tokens_per_step / (now - self._previous), 1)
        self._previous = now
        listed = step % self._plan.log_every == 0 or step == self._plan.steps
        self._log.write(step, values, chart=listed)
        self._progress.update(step, values["loss"], line=listed)
        self._give_up_if_lost(step, values)

    def pause(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something whose time is not the steps'."""
        begin = time.perf_counter()
        result = work(*args)
        if self._previous is not None:
            self._previous += time.perf_counter() - begin
        return result

    def _give_up_if_lost(self, step: int, values: dict[str, float]) -> None:
        self._bad = 0 if math.isfinite(values["loss"]) else self._bad + 1
        if self._bad >= PATIENCE:
            raise ValueError(
                f"the loss has not been finite since step {step - PATIENCE + 1}; start again in another --output with "
                "a lower --learning-rate or a longer --warmup-steps, or with --params-dtype float32"
            )
