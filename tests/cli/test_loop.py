"""The training loop, with a step that is a counter."""

import itertools
import math
import os
import signal
import time

import jax
import jax.numpy as jnp
import pytest

from jax_te.cli.loop import LoopActions, LoopPlan, StopRequest, run_loop
from jax_te.metrics import Speed, StepTrace, StepWork
from jax_te.metrics.log import MetricsLog, read_metrics
from jax_te.metrics.progress import PlainProgress, RichProgress, make_progress

MEASURED = {"tokens_per_second", "tokens_per_second_per_device", "mfu"}


class Run:
    """A run whose state is a number and whose loss at step n is 1 / n."""

    def __init__(self, directory):
        self.directory, self.saved, self.heldout, self.events = directory, {}, {}, []

    def step(self, state, batch):
        assert batch == state  # batches come in order
        return state + 1, {"loss": 1.0 / (state + 1), "skipped": 0.0}

    def evaluate(self, state):
        self.events.append(("eval", state))
        return 10.0 / state

    def save(self, step, state, heldout):
        assert step == state
        written = [record["step"] for record in read_metrics(self.directory) if "loss" in record]
        assert written == list(range(1, step + 1))  # nothing on disk is behind the checkpoint
        self.events.append(("save", step))
        self.saved[step], self.heldout[step] = state, heldout

    def __call__(self, *, first=0, steps=10, step=None, progress=None, **options):
        actions = {name: options.pop(name) for name in ("check", "trace") if name in options}
        cadence = {"save_every": 4, "eval_every": 3, "log_every": 5} | options
        plan = LoopPlan(steps=steps, work=StepWork(tokens=100, flops=1e3, peak=1e3), **cadence)
        with MetricsLog(self.directory, resume_step=first) as log:
            actions = LoopActions(step=step or self.step, evaluate=self.evaluate, save=self.save, **actions)
            progress = progress or PlainProgress()
            return run_loop(first, itertools.count(first), actions, plan, log=log, progress=progress, first=first)


def losses(directory):
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in read_metrics(directory)]


def test_what_fails_in_the_background_ends_the_run_at_the_next_step(tmp_path):
    """Not at the next checkpoint, which may be hours away."""
    asked = itertools.count(1)

    def check():
        if next(asked) == 6:
            raise OSError(28, "no space left on the disk")

    run = Run(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        run(check=check, save_every=100)
    assert [record["step"] for record in read_metrics(tmp_path) if "loss" in record] == [1, 2, 3, 4]


def test_every_step_is_recorded_and_cadences_are_kept(tmp_path, capsys):
    run = Run(tmp_path)
    result = run()
    assert (result.state, result.step, result.stopped_by) == (10, 10, None)
    assert result.heldout_loss == 1.0
    assert run.events == [
        ("eval", 3), ("save", 4), ("eval", 6), ("save", 8), ("eval", 9), ("eval", 10), ("save", 10)
    ]  # fmt: skip
    records = read_metrics(tmp_path)
    assert [r["loss"] for r in records if "loss" in r] == [1.0 / n for n in range(1, 11)]
    assert [r["step"] for r in records if "heldout_loss" in r] == [3, 6, 9, 10]
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["5/10", "10/10"]
    assert "loss 0.1000" in lines[1]
    assert "tokens/s" in lines[1]
    assert "% MFU" in lines[1]
    assert MEASURED & records[0].keys() == set()  # the first step compiles
    assert records[1].keys() >= MEASURED


def test_checkpoints_know_their_heldout_loss_if_it_is_computed(tmp_path):
    assert Run(tmp_path / "apart")().step == 10
    run = Run(tmp_path / "together")

    def step(state, batch):
        if state == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return run.step(state, batch)

    run(step=step, eval_every=7, eval_saved=True)
    assert run.heldout == {4: 10.0 / 4, 8: 10.0 / 8, 9: None}  # a signal waits for no evaluation
    run(first=9, eval_every=7)
    assert run.heldout[10] == 1.0


def test_a_resumed_run_records_what_an_unbroken_one_does(tmp_path):
    Run(tmp_path / "unbroken")()
    Run(tmp_path / "resumed")(steps=7)
    Run(tmp_path / "resumed")(first=4)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "unbroken")


def test_a_finished_run_does_nothing_more(tmp_path):
    result = Run(tmp_path)(first=10)
    assert (result.step, result.heldout_loss, result.tokens_per_second) == (10, None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number, capfd):
    run = Run(tmp_path / "stopped")

    def step(state, batch):
        if state == 4:
            os.kill(os.getpid(), number)
        return run.step(state, batch)

    before = signal.getsignal(number)
    result = run(step=step)
    assert signal.getsignal(number) is before
    assert (result.step, result.stopped_by) == (5, number)
    assert run.events[-1] == ("save", 5)
    assert f"{number.name}: finishing this step and saving" in capfd.readouterr().err
    run(first=5)
    Run(tmp_path / "unbroken")()
    assert losses(tmp_path / "stopped") == losses(tmp_path / "unbroken")


def test_a_signal_after_a_steps_checkpoint_ends_the_run_after_the_next_step(tmp_path):
    run = Run(tmp_path)
    save = run.save

    def save_and_signal(step, state, heldout):
        save(step, state, heldout)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    run.save = save_and_signal
    result = run()
    assert (result.step, result.stopped_by) == (5, signal.SIGTERM)
    assert sorted(run.saved) == [4, 5]


def test_a_handler_of_c_code_gives_way_to_the_default(monkeypatch):
    """Python tells of such a handler by None, and cannot set it again."""
    handlers = {}

    def install(number, handler):
        if not callable(handler) and handler is not signal.SIG_DFL:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        handlers[number] = handler

    monkeypatch.setattr(signal, "signal", install)
    with StopRequest() as stop:
        assert stop.signal is None
    assert handlers == {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_DFL}


def test_a_second_signal_acts_as_usual():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts without it
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ({"loss": math.nan}, "loss not finite"),
        ({"grad_norm": math.inf, "skipped": 1.0}, "grad_norm not finite"),
        ({"skipped": 1.0}, "the last one skipped"),
    ],
)
def test_a_run_that_has_lost_its_way_is_given_up(tmp_path, lost, reason):
    def step(state, batch):
        good = {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}
        return state + 1, good | (lost if state >= 2 and state != 5 else {})

    with pytest.raises(ValueError, match=f"7 steps in a row, from step 7 on, were lost: {reason}.*--give-up-after"):
        Run(tmp_path)(step=step, steps=1000, save_every=1000, eval_every=1000, give_up_after=7)
    assert read_metrics(tmp_path)[-1]["step"] == 13


def test_what_a_step_raises_ends_the_display(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(OSError, match="disk"):
        Run(tmp_path)(progress=RichProgress(), step=lambda state, batch: (_ for _ in ()).throw(OSError("disk")))
    written = capsys.readouterr().out
    assert -1 < written.rfind("\x1b[?25l") < written.rfind("\x1b[?25h")  # the terminal has its cursor again


def test_in_a_terminal_there_is_a_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    progress = RichProgress()
    progress.facts({"model": "tiny [not markup]", "output": "runs/tiny"})
    Run(tmp_path)(progress=progress)
    progress.text("sample", "def f(x):\n    return x[0]")
    shown = capsys.readouterr().out
    for text in ("[not markup]", "10", "0.1000", "tokens/s", "ETA", "return x[0]"):
        assert text in shown


def test_without_a_terminal_there_are_plain_lines(capsys):
    progress = make_progress()
    assert isinstance(progress, PlainProgress)
    progress.facts({"model": "tiny", "backend": "one\ntwo"})
    progress.note("resumed")
    progress.text("sample", "def f")
    assert capsys.readouterr().out == "model    tiny\nbackend  one\n         two\nresumed\n--- sample ---\ndef f\n---\n"


STEP_SECONDS = 0.03


def sleeping_step(state, batch):
    """Return only when the step is done, as a step on a CPU may."""
    time.sleep(STEP_SECONDS)
    return state + 1, {"loss": 1.0}


@jax.jit
def _sleep(x):
    def sleep(x):
        time.sleep(STEP_SECONDS)
        return x

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x)


class Dispatched:
    """Steps that a device does one after the other, long after they are dispatched."""

    def __init__(self):
        self.loss = jnp.zeros((), jnp.float32)

    def __call__(self, state, batch):
        self.loss = _sleep(self.loss)
        return state + 1, {"loss": self.loss}


class SlowTrace(StepTrace):
    """A trace that takes as long as 10 steps to begin, and to be summed up."""

    def before(self, step):
        if step == self.first:
            time.sleep(10 * STEP_SECONDS)

    def after(self, step):
        time.sleep(10 * STEP_SECONDS)


@pytest.mark.parametrize("make_step", [lambda: sleeping_step, Dispatched], ids=["done when called", "dispatched"])
def test_the_speed_is_that_of_steps_alone(tmp_path, capsys, make_step):
    """An evaluation, a checkpoint or a trace after a step makes neither that step faster nor the run slower."""

    class Slow(Run):
        def evaluate(self, state):
            time.sleep(10 * STEP_SECONDS)
            return 1.0

        def save(self, step, state, heldout):
            time.sleep(10 * STEP_SECONDS)

    trace = SlowTrace(tmp_path / "profile", 5, 6)
    result = Slow(tmp_path)(step=make_step(), steps=12, eval_every=2, save_every=5, log_every=1, trace=trace)
    most = 100 / STEP_SECONDS  # tokens/s of a step that only sleeps, which no step can exceed
    rates = {r["step"]: r["tokens_per_second"] for r in read_metrics(tmp_path) if "tokens_per_second" in r}
    assert max(rates.values()) < 1.1 * most  # steps end a little late, so one may seem shorter than it was
    # A busy machine makes steps longer; the work between steps would make them more than 5 times as long.
    assert result.tokens_per_second == pytest.approx(most, rel=0.6)
    shown = [int(line.split()[4].replace(",", "")) for line in capsys.readouterr().out.splitlines() if "% MFU" in line]
    assert shown[-1] == pytest.approx(result.tokens_per_second, abs=1)
    assert len(rates) >= 8


def test_speed_is_measured_between_moments_and_without_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed = Speed(StepWork(tokens=1000, devices=4, flops=1e12, peak=1e12))
    assert (speed.seconds_per_step, speed.seconds_left(100), speed.rates()) == (None, None, {})
    now[0] = 60.0  # the first step compiles
    speed.done(6)
    assert (speed.seconds_per_step, speed.rates()) == (None, {})
    now[0] = 62.0
    speed.done(10)
    assert speed.rates() == {"tokens_per_second": 2000.0, "tokens_per_second_per_device": 500.0, "mfu": 0.5}
    assert speed.seconds_left(95) == 95 * 0.5
    for recurs in (True, False):
        with speed.pause(recurs=recurs):
            now[0] += 4.0
    speed.done(10)  # the same step again says nothing
    now[0] += 0.25
    speed.done(11)
    assert speed.rates()["tokens_per_second"] == 4000.0
    assert speed.seconds_per_step == 0.45
    assert speed.seconds_left(10) == pytest.approx(10 * (2.25 + 4.0) / 5)


def test_the_display_shows_mean_speed_and_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed, progress = Speed(StepWork(tokens=1000, devices=4, flops=1e12, peak=1e12)), PlainProgress()
    progress.start(5, 105, speed)
    progress.update(6, {"loss": 2.0}, line=True)
    speed.done(6)
    now[0] = 2.0
    speed.done(10)
    progress.update(10, {"loss": 1.5, "grad_norm": 3.0}, line=True)
    assert capsys.readouterr().out.splitlines() == [
        "step 6/105  loss 2.0000  … tokens/s  ETA -:--",
        "step 10/105  loss 1.5000  2,000 tokens/s (500 a device)  50.0% MFU  ETA 0:48",
    ]


def test_steps_are_traced_between_what_the_device_did_before_and_after(tmp_path, monkeypatch, capsys):
    run, events = Run(tmp_path), []

    class Trace(StepTrace):
        def before(self, step):
            events.append(("before", step, len(read_metrics(tmp_path))))

        def after(self, step):
            events.append(("after", step, len(read_metrics(tmp_path))))
            return "a table"

        def close(self):
            events.append("close")

    run(trace=Trace(tmp_path / "profile", 2, 3), eval_every=20, save_every=20)
    # The records of all steps before are read, which waits for the device.
    assert events == [("before", 2, 1), ("after", 3, 3), "close"]
    assert "--- kernels of steps 2 to 3 ---\na table\n" in capsys.readouterr().out
