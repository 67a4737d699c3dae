"""The training loop: steps, records, held-out losses, checkpoints, and an orderly end on SIGTERM or Ctrl-C."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import numpy as np

from jax_te._processes import Heartbeats
from jax_te.metrics import MetricsLog, Progress, Speed, StepTrace, StepWork
from jax_te.typing import PyTree


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Length of a run, and intervals of its actions, in steps.

    Args:
        steps: number of the run's last step.
        save_every, eval_every: intervals of checkpoints and of held-out losses; both also come at the end.
        eval_saved: whether held-out losses also come with checkpoints, except one that a signal requests.
        log_every: lines and TensorBoard points. ``metrics.jsonl`` has every step, and vectors at these points.
        inspect_every: steps that are inspected; 0 for none.
        work: work of a step, from which the speed is computed.
        give_up_after: steps in a row that made no update, or whose loss or gradient norm was not finite, after which a
            run is lost.
        learning_rate: function from an update's number, from 0, to its learning rate, for the record. None: not
            recorded.
    """

    steps: int
    save_every: int
    eval_every: int
    log_every: int
    work: StepWork
    inspect_every: int = 0
    give_up_after: int = 50
    learning_rate: Callable[[int], float] | None = None
    eval_saved: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopActions:
    """Functions that a run calls with its states.

    Args:
        step: function ``(state, batch) -> (state, metrics)``; metrics are numbers, with a ``"loss"``, and vectors.
        evaluate: function that returns the held-out loss of a state.
        save: ``(step, state, heldout_loss)``, the loss None where it was not computed; writes a checkpoint, and may
            return before it is on disk.
        check: function called at each step, which raises errors that occurred in the background since the last one.
            None: nothing.
        inspect: ``(step, state, batch)``, with the number of a step, the state before it and its batch. None: nothing.
        trace: trace of some steps. None: no trace.
        agree: function called at each step with the signal that this process received, or None; returns the signal to
            stop on. None: the process's own.
        heartbeats: heartbeats for the other processes. None: no heartbeats.
    """

    step: Callable[[PyTree, Any], tuple[PyTree, dict[str, Any]]]
    evaluate: Callable[[PyTree], float]
    save: Callable[[int, PyTree, float | None], None]
    check: Callable[[], None] | None = None
    inspect: Callable[[int, PyTree, Any], None] | None = None
    trace: StepTrace | None = None
    agree: Callable[[signal.Signals | None], signal.Signals | None] | None = None
    heartbeats: Heartbeats | None = None

    def begin(self, doing: str, *, waits: bool = False) -> None:
        """Report the next activity to the other processes."""
        if self.heartbeats is not None:
            self.heartbeats.begin(doing, waits=waits)


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Result of a run.

    Args:
        state: the last state.
        step: the last step done.
        stopped_by: the signal that ended the run early, or None.
        heldout_loss: held-out loss of the last state if it was computed in this run, else None.
        seconds: wall time of the loop.
        tokens_per_second: mean of the steps that were timed (`jax_te.metrics.Speed`), without work between steps;
            None if there were none.
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
            number, handler = self._before.popitem()
            # None stands for a handler of C code, such as that of an embedding program, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number)
        self._restore()  # so that a second signal ends a run that hangs
        line = f"\njax-te: {self.signal.name}: finishing this step and saving; once more to stop at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())  # print() must not be used in a handler: it may have been interrupted itself


def run_loop(
    state: PyTree,
    batches: Iterator[Any],
    actions: LoopActions,
    plan: LoopPlan,
    *,
    log: MetricsLog,
    progress: Progress,
    first: int = 0,
    skipped: int = 0,
) -> LoopResult:
    """Return the result of steps ``first + 1 … plan.steps``.

    In step order the log gets each step's record, then its held-out loss, and only then its checkpoint is written: what
    is on disk after a crash is never behind the checkpoint.

    Args:
        state: the state after step ``first``.
        batches: batches of the steps, in order.
        actions: functions of the run's states.
        plan: length of the run, and intervals of its actions.
        log: log that gets the records.
        progress: display of the run's progress.
        first: steps done already.
        skipped: steps before ``first`` that made no update.

    Raises:
        ValueError: after ``plan.give_up_after`` lost steps in a row.
    """
    run = _Run(state, actions, plan, log, progress, first, skipped)
    begin = time.perf_counter()
    progress.start(first, plan.steps, run.speed)
    try:
        with StopRequest() as stop:
            while run.step < plan.steps and run.stopped_by is None:
                run.begin_step()
                run.do_step(next(batches))
                run.read_signal(stop)
                run.evaluate_if_due()
                run.save_if_due()
    finally:
        progress.stop()
        if actions.trace is not None:
            actions.trace.close()
    return run.result(time.perf_counter() - begin)


class _Run:
    """A run between two steps: its state, and the steps whose numbers have not been read.

    Attributes:
        state: the state after `step`.
        step: the last step that was dispatched.
        stopped_by: the signal to end on, or None.
        heldout: the held-out loss of `state`, None if it was not computed.
        speed: timing of the steps.
    """

    def __init__(
        self,
        state: PyTree,
        actions: LoopActions,
        plan: LoopPlan,
        log: MetricsLog,
        progress: Progress,
        first: int,
        skipped: int,
    ):
        self.state, self.step = state, first
        self.stopped_by: signal.Signals | None = None
        self.heldout: float | None = None
        self.speed = Speed(plan.work)
        self._actions, self._plan, self._log, self._progress = actions, plan, log, progress
        self._recorder = _Recorder(plan, log, progress, self.speed, skipped)
        # A step's numbers are read one step late: reading them waits for the device, which has the next step by then.
        self._pending: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

    def begin_step(self) -> None:
        """Go on to the next step, unless something went wrong in the background."""
        if self._actions.check is not None:
            self._actions.check()  # a run whose checkpoints are not written should not go on until the next one
        self._actions.begin(f"step {self.step + 1}, which it starts or compiles")
        self.step += 1

    def do_step(self, batch: Any) -> None:
        """Dispatch the step, inspected and traced where the plan says so, and read the numbers of the one before."""
        actions = self._actions
        if actions.inspect is not None and self._plan.inspect_every and self.step % self._plan.inspect_every == 0:
            with self._between_steps(recurs=True):
                actions.inspect(self.step, self.state, batch)
        if actions.trace is not None and self.step == actions.trace.first:
            with self._between_steps(recurs=False):
                actions.trace.before(self.step)
        self.state, metrics = actions.step(self.state, batch)
        self._pending.append((self.step, metrics))
        actions.begin(f"step {self.step}", waits=True)
        self._drain(keep=1)
        if actions.trace is not None and self.step == actions.trace.last:
            self._end_trace(actions.trace)

    def read_signal(self, stop: StopRequest) -> None:
        """Take the signal to end on; once a step, so that a signal that ends the loop also saves."""
        self.stopped_by = stop.signal
        if self._actions.agree is not None:
            self.stopped_by = self._actions.agree(self.stopped_by)

    def evaluate_if_due(self) -> None:
        """Compute the held-out loss at the end, every ``eval_every`` steps, and together with a checkpoint that is
        due."""
        plan = self._plan
        beside_save = plan.eval_saved and self._save_is_due and self.stopped_by is None
        self.heldout = None
        if not (self._is_last or self.step % plan.eval_every == 0 or beside_save):
            return
        self._drain(keep=0)
        self._actions.begin(f"the evaluation of step {self.step}")
        with self.speed.pause(recurs=True):
            self.heldout = self._actions.evaluate(self.state)
        self._log.write(self.step, {"heldout_loss": self.heldout})

    def save_if_due(self) -> None:
        """Write a checkpoint at the end, every ``save_every`` steps, and when a signal ends the run."""
        if not self._save_is_due and self.stopped_by is None:
            return
        self._drain(keep=0)
        self._actions.begin(f"the save of step {self.step}", waits=True)
        with self.speed.pause(recurs=True):
            self._log.sync()  # first: a resumed run cuts the log after the step that it starts from
            self._actions.save(self.step, self.state, self.heldout)

    def result(self, seconds: float) -> LoopResult:
        """Return the result of the run."""
        per_step = self.speed.seconds_per_step
        return LoopResult(
            state=self.state,
            step=self.step,
            stopped_by=self.stopped_by,
            heldout_loss=self.heldout,
            seconds=seconds,
            tokens_per_second=self._plan.work.tokens / per_step if per_step else None,
        )

    @property
    def _is_last(self) -> bool:
        return self.step == self._plan.steps

    @property
    def _save_is_due(self) -> bool:
        return self._is_last or self.step % self._plan.save_every == 0

    def _end_trace(self, trace: StepTrace) -> None:
        """End the profile behind the last step that it has, and show the time of its kernels."""
        with self._between_steps(recurs=False):
            times = trace.after(self.step)
        if times is not None:
            self._progress.text(f"kernels of steps {trace.first} to {trace.last}", str(times))

    @contextlib.contextmanager
    def _between_steps(self, *, recurs: bool) -> Iterator[None]:
        """Wait until the device has done all steps, and do something that the speed leaves out."""
        self._drain(keep=0)
        with self.speed.pause(recurs=recurs):
            yield

    def _drain(self, keep: int) -> None:
        """Wait for steps and record their numbers, until those of the last ``keep`` are left."""
        while len(self._pending) > keep:
            oldest, metrics = self._pending.popleft()
            done = _wait(oldest, metrics, self._pending)
            if done is not None:
                self.speed.done(done)
            self._recorder.record(oldest, metrics)


def _wait(step: int, metrics: dict[str, Any], later: Iterable[tuple[int, dict[str, Any]]]) -> int | None:
    """Wait for a step; return the last one that the device has done now, None if it may be done for long.

    Where a step is dispatched only after those before it are done, as on a CPU, there is nothing to wait for, and all
    are done. One that was done while the device went on with later ones was done at an unknown time.
    """
    waited = not _is_ready(metrics)
    jax.block_until_ready(metrics)
    done, all_done = step, True
    for number, results in later:
        all_done = all_done and _is_ready(results)
        done = number if all_done else done
    return done if waited or all_done else None


def _is_ready(metrics: dict[str, Any]) -> bool:
    arrays: list[Any] = [value for value in metrics.values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)  # a method that jax.Array's own class does not declare


class _Recorder:
    """Turns a step's device scalars into a record and a progress update."""

    def __init__(self, plan: LoopPlan, log: MetricsLog, progress: Progress, speed: Speed, skipped: int):
        self._plan, self._log, self._progress, self._speed = plan, log, progress, speed
        self._skipped, self._bad = skipped, 0

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        on_host = jax.device_get(metrics)
        vectors = {name: value for name, value in on_host.items() if np.ndim(value)}
        values = {name: float(value) for name, value in on_host.items() if name not in vectors}
        values = {"loss": values.pop("loss"), **values}
        if self._plan.learning_rate is not None:
            values["learning_rate"] = self._plan.learning_rate(step - 1 - self._skipped)  # a skip does not advance it
        self._skipped += values.get("skipped", 0.0) > 0.0
        values |= self._speed.rates()
        listed = step % self._plan.log_every == 0 or step == self._plan.steps
        # A model of many experts has thousands of them: with the points of charts alone.
        self._log.write(step, values | vectors if listed else values, chart=listed)
        self._progress.update(step, values, line=listed)
        self._give_up_if_lost(step, values)

    def _give_up_if_lost(self, step: int, values: dict[str, float]) -> None:
        lost = [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]
        self._bad = self._bad + 1 if lost or values.get("skipped") else 0
        if self._bad >= self._plan.give_up_after:
            # Scaled fp16 loses single steps; this many in a row do not come back.
            what = f"{' and '.join(lost)} not finite" if lost else "the last one skipped"
            raise ValueError(
                f"{self._bad} steps in a row, from step {step - self._bad + 1} on, were lost: {what}. Start again in "
                "another --output with a lower --learning-rate, a longer --warmup-steps, --params-dtype float32 or "
                "another --recipe, or let more steps be lost with --give-up-after"
            )
