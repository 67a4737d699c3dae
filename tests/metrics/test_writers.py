"""Where metrics go."""

import json
import struct
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jax_te.metrics import MetricsLog
from jax_te.metrics.log import read_metrics
from tests.support.numerics import without_type_checker


class Own:
    """A writer of one's own, and what it got."""

    def __init__(self):
        self.calls = []

    def write(self, step, values):
        self.calls.append((step, dict(values)))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_only_the_writers_that_are_named(tmp_path):
    own = Own()
    with MetricsLog(tmp_path, writers=["jsonl", own]) as log:
        log.write(1, {"loss": jnp.float32(0.5), "tokens": 3}, chart=False)
        log.write(2, {"loss": 0.25})
        log.chart(2, {"amax": 1.0})
        log.sync()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5, "tokens": 3}, {"step": 2, "loss": 0.25}]
    assert own.calls == [(2, {"loss": 0.25}), (2, {"amax": 1.0}), "flush", "close"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_vectors_are_lists_and_in_charts_numbers(tmp_path):
    own = Own()
    with MetricsLog(tmp_path, writers=["jsonl", "tensorboard", own]) as log:
        log.write(1, {"loss": 0.5, "load": jnp.array([2.0, jnp.inf])})
        log.write(2, {"load": jnp.array([1.0, 3.0])}, chart=False)
        log.chart(3, {"load": jnp.array([4])})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5, "load": [2.0, None]}, {"step": 2, "load": [1.0, 3.0]}]
    assert own.calls == [(1, {"loss": 0.5, "load/0": 2.0, "load/1": float("inf")}), (3, {"load/0": 4.0}), "close"]


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    own = Own()
    with MetricsLog(tmp_path / "run", writers=["jsonl", "tensorboard", own]) as log:
        log.write(1, {"loss": 0.5})
        log.chart(1, {"loss": 0.5})
        log.sync()
    assert own.calls == []
    assert not (tmp_path / "run").exists()


def charted(folder):
    """Return the steps of ``loss`` that TensorBoard shows: a session's start hides the steps from its own on."""
    steps = []
    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])  # length, its checksum, the event, its checksum
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.session_log.status == SessionLog.START:
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return steps


@pytest.mark.parametrize(("resume_step", "shown"), [(0, [1]), (2, [1, 2, 3]), (None, [1, 2, 3, 1])])
def test_charts_show_the_records_that_are_kept(tmp_path, resume_step, shown):
    own = 1 if resume_step is None else resume_step + 1
    for session, (steps, resume) in enumerate([((1, 2, 3), 0), ((own,), resume_step)]):
        with MetricsLog(tmp_path, writers=["tensorboard"], resume_step=resume) as log:
            for step in steps:
                log.write(step, {"loss": 0.5})
        # tensorboardX names a file by the second in which it is opened, which may be that of the other session.
        (written,) = tmp_path.glob("tensorboard/events.out.*")
        written.rename(written.with_name(f"events.{session}"))
    assert charted(tmp_path / "tensorboard") == shown


def test_weights_and_biases_go_on_in_the_same_run(tmp_path, monkeypatch):
    runs = []

    class Run(Own):
        def log(self, values):
            self.calls.append(values)

        def define_metric(self, name, *, step_metric):
            assert (name, step_metric) == ("*", "step")

        def finish(self):
            self.calls.append("finish")

    def init(**settings):
        runs.append((settings, Run()))
        return runs[-1][1]

    package = types.ModuleType("wandb")
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    for resume_step in (0, 4, 0):
        with MetricsLog(tmp_path / "run", writers=["wandb"], resume_step=resume_step) as log:
            log.write(resume_step + 1, {"loss": 0.5, "grad_norm": float("nan")})
    ids = [settings["id"] for settings, _ in runs]
    assert ids[0] == ids[1] != ids[2]  # a new run in the folder is another
    assert {(settings["name"], settings["resume"]) for settings, _ in runs} == {("run", "allow")}
    assert runs[1][1].calls == [{"step": 5, "loss": 0.5}, "finish"]


@pytest.mark.parametrize(
    ("writer", "error", "message"),
    [
        ("wandb", ModuleNotFoundError, r'package wandb .*"\.\[wandb\]"'),
        ("tensorboard", ModuleNotFoundError, r'package tensorboardX .*"\.\[train\]"'),
        ("csv", ValueError, "no writer is called 'csv'; there are jsonl, tensorboard, wandb, and your own"),
        (print, TypeError, "has write, flush and close; got <built-in"),
    ],
)
def test_what_is_no_writer(tmp_path, monkeypatch, writer, error, message):
    for package in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with without_type_checker(), pytest.raises(error, match=message):
        MetricsLog(tmp_path, writers=[writer])


def test_a_line_holds_what_json_can(tmp_path):
    with MetricsLog(tmp_path, writers=["jsonl"]) as log:
        log.write(3, {"loss": float("inf"), "skipped": True})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": None, "skipped": True}
