"""metrics.jsonl, TensorBoard and the plot."""

import json
import math
import sys
import types

import jax.numpy as jnp
import pytest
from matplotlib.figure import Figure

from jax_te._validation import require_extra
from jax_te.cli.main import explain
from jax_te.metrics.log import METRICS_FILE, MetricsLog, plot_losses, read_metrics
from jax_te.metrics.precision_log import PRECISION_FILE, PrecisionLog
from jax_te.metrics.progress import PlainProgress, RichProgress
from tests.support.numerics import without_type_checker


def write(directory, steps, resume_step=0):
    with MetricsLog(directory, resume_step=resume_step) as log:
        for step in steps:
            log.write(step, {"loss": 1.0 / step})


def test_a_record_is_a_line_and_keeps_every_bit(tmp_path):
    loss = 1.9371509552001953
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": loss, "learning_rate": 1e-3})
        log.write(1, {"heldout_loss": math.nan})
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "loss": loss, "learning_rate": 1e-3}
    assert json.loads(lines[1]) == {"step": 1, "heldout_loss": None}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_resumed_file_equals_an_unbroken_one(tmp_path):
    write(tmp_path / "unbroken", range(1, 11))
    write(tmp_path / "resumed", range(1, 8))
    write(tmp_path / "resumed", range(5, 11), resume_step=4)
    unbroken, resumed = ((tmp_path / name / METRICS_FILE).read_bytes() for name in ("unbroken", "resumed"))
    assert unbroken == resumed


@pytest.mark.parametrize("rest", ["{", '{"step": 3, "lo', '{"step": 3, "loss": 1}'])
def test_what_a_killed_run_left_unfinished_is_cut(tmp_path, rest):
    write(tmp_path, (1, 2))
    whole = (tmp_path / METRICS_FILE).read_bytes()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(rest)
    write(tmp_path, (), resume_step=3)
    assert (tmp_path / METRICS_FILE).read_bytes() == whole


def test_a_damaged_line_costs_no_other_when_a_run_is_resumed(tmp_path):
    write(tmp_path, (1, 2, 3, 4))
    path = tmp_path / METRICS_FILE
    first, _, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, b'{"step": 2, "lo\xff\n', *rest]))
    write(tmp_path, (4, 5), resume_step=3)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3, 4, 5]


LINES = ["not json\n", '{"loss": 1}\n', "[1]\n", '{"epoch": 1}', '{"step": "one"}\n', "\n"]


@pytest.mark.parametrize("resume_step", [0, 3])
@pytest.mark.parametrize("log", [MetricsLog, PrecisionLog])
def test_lines_that_are_no_records_stay(log, tmp_path, resume_step):
    """Whoever wrote them: only records of later steps are removed, and what one of them left unfinished."""
    name = METRICS_FILE if log is MetricsLog else PRECISION_FILE
    records = [f'{{"step": {step}, "loss": 1}}\n' for step in range(1, 7)]
    others = [*LINES[:3], LINES[3] + "\n", *LINES[4:]]
    mixed = [line for pair in zip(records, others, strict=True) for line in pair]
    (tmp_path / name).write_text("".join([*mixed, LINES[3]]))
    opened = log(tmp_path, resume_step=resume_step)
    if isinstance(opened, MetricsLog):
        opened.close()
    kept = [line for line in mixed if line in others or line in records[:resume_step]]
    assert (tmp_path / name).read_text() == "".join([*kept, LINES[3], "\n"])
    assert not (tmp_path / (name + ".partial")).exists()


def test_a_record_begins_a_line_also_behind_one_without_an_end(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"epoch": 1}')
    write(tmp_path, (1,))
    assert (tmp_path / METRICS_FILE).read_text() == '{"epoch": 1}\n{"step": 1, "loss": 1.0}\n'


@pytest.mark.parametrize("log", [MetricsLog, PrecisionLog])
@pytest.mark.parametrize("content", [*LINES, '{"step": 1, "lo'])
def test_a_file_that_it_cannot_read_is_refused_without_a_step(log, content, tmp_path):
    for name in (METRICS_FILE, PRECISION_FILE):
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="is not empty, and no line of it is a whole record of a run; give another"):
        log(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        METRICS_FILE: content,
        PRECISION_FILE: content,
    }


def test_an_unfinished_line_is_not_read(tmp_path):
    write(tmp_path, (1,))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_new_run_starts_an_empty_file(tmp_path):
    write(tmp_path, (1, 2, 3))
    write(tmp_path, (1,))
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("log", [MetricsLog, PrecisionLog])
def test_records_are_removed_only_by_a_step_that_was_given(log, tmp_path):
    line = '{"step": 3, "loss": 1.0}\n'
    for name in (METRICS_FILE, PRECISION_FILE):
        (tmp_path / name).write_text(line)
    with pytest.raises(
        ValueError, match=r"up to step 3; give the step of the restored checkpoint as resume_step, or 0"
    ):
        log(tmp_path)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [line, line]


@pytest.mark.parametrize(
    ("values", "message"),
    [({"step": 7.0}, "another name than 'step'"), ({"map": jnp.ones((2, 2))}, r"map has shape \[2, 2\]")],
    ids=["step", "two axes"],
)
def test_values_that_no_record_can_hold_are_refused(values, message, tmp_path):
    with MetricsLog(tmp_path, writers=["jsonl"]) as log, pytest.raises(ValueError, match=message):
        log.write(1, values)
    assert read_metrics(tmp_path) == []


def test_the_plot_is_a_png(tmp_path):
    assert plot_losses(tmp_path) is None
    with MetricsLog(tmp_path) as log:
        for step in range(1, 30):
            log.write(step, {"loss": 5.0 / step})
        log.write(29, {"heldout_loss": 0.2})
    path = plot_losses(tmp_path, bigram_entropy=2.4)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_names_the_unit_of_the_loss(tmp_path, monkeypatch):
    write(tmp_path, (1, 2))
    labels, save = [], Figure.savefig

    def watched(figure, *args, **kwargs):
        labels.append(figure.axes[0].get_ylabel())
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", watched)
    plot_losses(tmp_path)
    plot_losses(tmp_path, unit="byte")
    assert labels == ["nats per token", "nats per byte"]


def test_values_that_are_no_numbers_are_not_drawn(tmp_path):
    """And a folder's name is not a formula."""
    folder = tmp_path / "a$\\frac$"
    write(folder, (1, 2))
    with (folder / METRICS_FILE).open("a") as file:
        for step, value in enumerate(("x", [1], {}, 10**400, None), start=3):
            file.write(json.dumps({"step": step, "loss": value, "heldout_loss": value}) + "\n")
        file.write(json.dumps({"step": 10**400, "loss": 2.0}) + "\n")
    assert [record["step"] for record in read_metrics(folder)] == [*range(1, 8)]
    assert plot_losses(folder) == folder / "loss.png"


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r'tensorboardX.*pip install -e "\.\[train\]" in a checkout'):
        require_extra("tensorboardX")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import portpicker_that_is_missing.ports",
            r"^the package grainy of the extra 'train' needs the module portpicker_that_is_missing, which is missing; "
            r'install it with: pip install -e "\.\[train\]" in a checkout of jax_te; or.*'
            r"pip install portpicker_that_is_missing$",
        ),
        ("import grainy.gone", r"grainy of the extra 'train' cannot be imported \(No module named 'grainy.gone'\)"),
        (
            "from json import gone",
            "cannot be imported .*cannot import name 'gone'.*pip install --force-reinstall grainy$",
        ),
    ],
    ids=["another module", "a part of itself", "a name"],
)
def test_what_a_package_of_an_extra_lacks_is_named(code, message, tmp_path, monkeypatch):
    """As where grain is installed, and portpicker, which it imports, is not."""
    (tmp_path / "grainy").mkdir()
    (tmp_path / "grainy" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=message) as caught:
        require_extra("grainy")
    assert explain(caught.value) == str(caught.value)  # one line on the command line


@pytest.mark.parametrize("wrong", ["wandbb", object()])
def test_a_refused_log_leaves_the_records(tmp_path, wrong):
    write(tmp_path, range(1, 4))
    before = (tmp_path / METRICS_FILE).read_bytes()
    refused = pytest.raises((ValueError, TypeError), match=r"a writer is one of|no writer is called")
    with without_type_checker(), refused:
        MetricsLog(tmp_path, writers=["jsonl", wrong], resume_step=1)
    assert (tmp_path / METRICS_FILE).read_bytes() == before


@pytest.mark.parametrize("value", [None, "3", 1j, ["a"]], ids=repr)
def test_values_that_are_no_numbers_are_refused(value, tmp_path):
    refused = pytest.raises(TypeError, match=r"metrics are numbers and vectors .*; wrong is")
    with MetricsLog(tmp_path, writers=["jsonl"]) as log, without_type_checker(), refused:
        log.write(1, {"loss": 2.0, "wrong": value})
    assert read_metrics(tmp_path) == []


class Closing:
    """A writer that may fail to close."""

    def __init__(self, error=None):
        self.error, self.closed = error, False

    def write(self, step, values): ...

    def flush(self): ...

    def close(self):
        self.closed = True
        if self.error is not None:
            raise self.error


def test_a_writer_that_fails_to_close_leaves_no_other_open(tmp_path):
    first, last = Closing(OSError("disk")), Closing()
    with pytest.raises(OSError, match="disk"):
        MetricsLog(tmp_path, writers=[first, last]).close()
    assert first.closed
    assert last.closed


@pytest.mark.parametrize("given", [["jsonl", "jsonl"], [writer := Closing(), "jsonl", writer]], ids=["name", "own"])
def test_a_writer_that_is_given_twice_is_refused(given, tmp_path):
    with pytest.raises(ValueError, match="given twice"):
        MetricsLog(tmp_path, writers=given)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_does_not_open_costs_no_record(tmp_path, monkeypatch):
    write(tmp_path, range(1, 4))

    def init(**_):
        raise ConnectionError("no network")

    wandb = types.ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConnectionError, match="no network"):
        MetricsLog(tmp_path, writers=["jsonl", "wandb"], resume_step=1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("make", [PlainProgress, RichProgress])
def test_progress_that_has_not_begun_says_so(make):
    with pytest.raises(ValueError, match="call start"):
        make().update(1, {"loss": 1.0}, line=True)
