"""What a start does in a folder that other starts, or other programs, have used: no record is lost."""

import fcntl
import shutil
from pathlib import Path

import pytest

from jax_te.cli.main import main
from jax_te.training import learning_rate_schedule
from tests.support.runs import MICRO, TEXT, assert_refused, configured, records

FOREIGN = {"metrics.jsonl": b'{"epoch": 1}\n', "precision.jsonl": b'{"epoch": 1}\n', "loss.png": b"of another program"}
UNSAVED = b'{"step": 1, "loss": 5.5}\n{"step": 2, "loss": 5.25}\n{"step": 3, "lo'


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refuse(capsys, output, *argv):
    """Start a new run, which is refused; return its error if nothing in the folder has changed."""
    before = contents(output)
    status = main(["train", "--output", str(output), *MICRO, *argv])
    assert contents(output) == before
    return status, capsys.readouterr().err


@pytest.fixture
def run(trained, tmp_path, capsys):
    """A copy of a finished run."""
    shutil.copytree(trained, tmp_path / "run")
    capsys.readouterr()
    return tmp_path / "run"


@pytest.fixture
def unsaved(tmp_path):
    """The folder of a run that was killed in step 3, before its first checkpoint."""
    folder = tmp_path / "run"
    configured(folder, *MICRO)
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_bytes(UNSAVED)
    return folder


@pytest.mark.slow
def test_a_run_below_its_data_resumes(trained, tmp_path, monkeypatch, caplog):
    """Neither its own files are its text, nor those of other runs and models, which come and go."""
    shutil.copy(TEXT, tmp_path / "text.py")
    monkeypatch.chdir(tmp_path)
    argv = ["train", *MICRO, "--data", "."]
    assert main([*argv, "--steps", "4"]) == 0
    assert Path("runs/tiny/config.json").exists()
    assert main(["convert", "runs/tiny", "runs/tiny-hf"]) == 0
    shutil.copytree(trained, "other")
    (tmp_path / "saved").mkdir()
    shutil.copytree(trained / "checkpoints" / "12", "saved/step")
    assert main([*argv, "--steps", "6"]) == 0
    assert [record["step"] for record in records(Path("runs/tiny"))][-1] == 6
    assert "left out, 4 of them" in caplog.text


@pytest.mark.parametrize("run", [".", "notes"])
def test_what_is_in_the_folder_of_a_run_is_never_its_text(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.txt").write_text("a note " * 1000)
    monkeypatch.chdir(tmp_path)
    status = main(["train", *MICRO, "--data", ".", "--output", run])
    said = {".": "is the folder of the run as well", "notes": "no text in"}[run]
    assert_refused(status, capsys.readouterr().err.splitlines()[-1] + "\n", said)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "notes", tmp_path / "notes" / "text.txt"]


@pytest.mark.parametrize("plots", [True, False], ids=["finished", "killed"])
def test_records_of_a_run_whose_checkpoints_were_moved_away(run, plots, capsys):
    (run / "checkpoints").rename(run.parent / "elsewhere")
    if not plots:  # which are drawn when a run ends in order
        (run / "loss.png").unlink()
    texts = ["no checkpoints, but metrics.jsonl", str(run / "checkpoints"), "give another --output", "delete them"]
    assert_refused(*refuse(capsys, run), *texts)


@pytest.mark.parametrize("plots", [True, False], ids=["finished", "killed"])
def test_records_of_a_run_whose_checkpoints_were_moved_out_of_their_folder(run, plots, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    if not plots:
        (run / "loss.png").unlink()
    assert_refused(*refuse(capsys, run), "no checkpoints, but metrics.jsonl")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_program(tmp_path, name, capsys):
    (tmp_path / name).write_bytes(FOREIGN[name])
    assert_refused(*refuse(capsys, tmp_path), f"no checkpoints, but {name} of another run or program")


def test_records_of_an_unsaved_run_of_another_configuration(unsaved, capsys):
    texts = ["no checkpoints, but metrics.jsonl", "--seed was 0, is 1"]
    assert_refused(*refuse(capsys, unsaved, "--seed", "1"), *texts)


def test_an_unsaved_run_without_records_may_be_replaced(tmp_path, capsys):
    """Nothing is lost then. This start is refused for its text, which is read after the records are looked at."""
    configured(tmp_path, *MICRO)
    (tmp_path / "metrics.jsonl").touch()
    argv = ("--seed", "1", "--data", str(tmp_path / "none"))
    assert_refused(*refuse(capsys, tmp_path, *argv), "no such file or folder of text")


def test_records_of_a_run_that_is_running_are_nobodys_to_move(unsaved, capsys):
    with (unsaved / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_refused(*refuse(capsys, unsaved, "--seed", "1"), "another jax-te train is running in")


@pytest.mark.slow
def test_an_unsaved_run_begins_anew_and_keeps_its_old_records(unsaved, trained, capsys):
    (unsaved / "metrics.jsonl.abandoned").write_text("of the start before")
    assert main(["train", "--output", str(unsaved)]) == 0
    shown = capsys.readouterr().out
    assert "ended before its first checkpoint; its records are now metrics.jsonl.abandoned+\n" in shown
    assert (unsaved / "metrics.jsonl.abandoned").read_text() == "of the start before"
    assert (unsaved / "metrics.jsonl.abandoned+").read_bytes() == UNSAVED
    assert records(unsaved) == records(trained)


@pytest.mark.slow
def test_more_steps_after_an_unsaved_run_are_a_new_run_with_a_schedule_of_its_own(tmp_path, capsys):
    output, (first, *others) = tmp_path / "run", MICRO
    options = [first, *others[: others.index("--warmup-steps")], *others[others.index("--warmup-steps") + 2 :]]
    configured(output, *options, "--steps", "5")
    (output / "checkpoints").mkdir()
    (output / "metrics.jsonl").write_bytes(UNSAVED)
    assert main(["train", "--output", str(output), *options, "--steps", "20"]) == 0
    shown = capsys.readouterr().out
    assert "--steps was 5, is 20; --warmup-steps was 0, is 2; --decay-steps was 5, is 20\n" in shown
    assert "0.01 after 2 steps of warm-up, then a cosine to 0.001 at step 20\n" in shown
    assert (output / "metrics.jsonl.abandoned").read_bytes() == UNSAVED
    rates = [record["learning_rate"] for record in records(output) if "loss" in record]
    assert rates == pytest.approx(
        [float(learning_rate_schedule(0.01, total_steps=20, warmup_steps=2)(n)) for n in range(20)]
    )


def test_a_start_that_fails_leaves_the_records_of_an_unsaved_run(unsaved, capsys):
    assert_refused(*refuse(capsys, unsaved, "--data", str(unsaved / "none")), "no such file or folder of text")


def when_locked(monkeypatch, change):
    """Call ``change`` when a start is about to lock its folder: as if another run had held it, and ended just then."""
    lock, changes = fcntl.flock, [change]

    def flock(file, how):
        if how & fcntl.LOCK_EX and changes:
            changes.pop()()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.costly("unsaved")
@pytest.mark.parametrize("first", ["nothing", "unsaved"])
def test_a_run_that_ends_while_a_second_start_reads_is_resumed(tmp_path, trained, first, monkeypatch, capsys):
    output = tmp_path / "run"
    if first == "unsaved":
        configured(output, *MICRO)
        (output / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
        (output / "checkpoints").mkdir()
    when_locked(monkeypatch, lambda: shutil.copytree(trained, output, dirs_exist_ok=True))
    capsys.readouterr()
    assert main(["train", "--output", str(output), *MICRO]) == 0
    shown = capsys.readouterr().out
    assert "another jax-te train has ended in this folder meanwhile" in shown
    assert "resumed after step 12" in shown
    assert (output / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()


def test_a_run_of_another_configuration_that_ends_while_a_start_reads(tmp_path, trained, monkeypatch, capsys):
    output = tmp_path / "run"
    when_locked(monkeypatch, lambda: shutil.copytree(trained, output, dirs_exist_ok=True))
    status = main(["train", "--output", str(output), *MICRO, "--seed", "1"])
    assert_refused(status, capsys.readouterr().err, "--seed is 0 there, 1 here")
    assert {name: data for name, data in relative(output).items() if name != Path(".lock")} == {
        name: data for name, data in relative(trained).items() if name != Path(".lock")
    }


def relative(folder):
    return {path.relative_to(folder): data for path, data in contents(folder).items()}


@pytest.mark.costly("", slow=("--data moved",))
@pytest.mark.parametrize("argv", [[], ["--steps", "8"], ["--data", "moved"]], ids=" ".join)
def test_a_call_on_a_complete_run_changes_nothing(run, argv, capsys):
    if "moved" in argv:
        argv = ["--data", str(shutil.copy(TEXT, run.parent / "moved"))]
    before = {path: (data, path.stat().st_mtime_ns) for path, data in contents(run).items()}
    assert main(["train", "--output", str(run), *argv]) == 0
    assert "step 12 of " in capsys.readouterr().out
    assert {path: (data, path.stat().st_mtime_ns) for path, data in contents(run).items()} == before


@pytest.mark.costly
def test_a_run_that_was_killed_before_its_plots_gets_them(run):
    (run / "loss.png").unlink()
    assert main(["train", "--output", str(run)]) == 0
    assert (run / "loss.png").exists()
