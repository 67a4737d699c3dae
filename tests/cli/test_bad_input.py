"""What is refused: one line, status 2, nothing made and nothing lost."""

import dataclasses
import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest

from jax_te.cli.build import contexts
from jax_te.cli.main import main
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import resolve
from jax_te.cli.run_checks import check_te_on_mesh
from jax_te.cli.run_files import read_config, write_config
from jax_te.ops.te import available
from tests.support.runs import MICRO, TEXT, assert_refused, configured, records


def refuse(capsys, output, *argv):
    status = main(["train", *MICRO, "--output", str(output), *map(str, argv)])
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["--data", "no/such/path"], ["no such file or folder of text", "no/such/path"]),
        (["--hidden-size", "36", "--num-heads", "8"], ["--hidden-size 36", "--num-heads 8", "40"]),
        (["--num-query-groups", "3"], ["--num-heads 2", "--num-query-groups 3"]),
        (["--microbatches", "3"], ["--batch-size 4", "--microbatches 3", "6"]),
        (["--mesh", "data=3"], ["data*fsdp*expert = 3", "--batch-size", "6"]),
        (["--mesh", "tensor=4"], ["--num-query-groups 2", "tensor=4"]),
        (["--mesh", "context=8", "--seq-len", "40", "--cp-load-balanced"], ["--seq-len 40", "context=8", "16", "48"]),
        (["--mesh", "rows=4"], ["unknown mesh axis 'rows'", "data, fsdp, expert, context, tensor"]),
        (["--recipe", "delayed", "--ffn-hidden-size", "60"], ["--ffn-hidden-size 60", "by 16", "64"]),
        (
            ["--recipe", "current", "--seq-len", "30", "--batch-size", "2", "--mesh", "data=2"],
            ["tokens of a microbatch", "60", "64", "mesh"],
        ),
        (["--margin", "1"], ["--margin", "--recipe delayed"]),
        (["--warmup-steps", "12"], ["--warmup-steps 12", "--decay-steps 12"]),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, argv, texts):
    assert_refused(*refuse(capsys, tmp_path / "run", *argv), *texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["--recipe", "current", "--inspect-every", "4"], ["--inspect-every", "leave out --inspect-every"]),
        (["--recipe", "block", "--microbatches", "2"], ["--microbatches 2", "recipe block"]),
        (["--recipe", "mxfp8", "--fp8-param"], ["--fp8-param", "recipe mxfp8"]),
        (["--recipe", "nvfp4"], ["recipe nvfp4"]),
    ],
)
def test_what_transformer_engine_leaves_to_xla_on_meshes(tmp_path, capsys, argv, texts):
    """Said at the start, with or without Transformer Engine, and not at the first step that does it."""
    sizes = ["--hidden-size", "128", "--num-heads", "1", "--ffn-hidden-size", "128", "--seq-len", "128"]
    options = [*sizes, "--backend", "te", "--mesh", "data=2", *argv]
    status, error = refuse(capsys, tmp_path / "run", *options)
    assert_refused(status, error, "--mesh data=2", "--backend auto", *texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["--backend", "te", "--recipe", "current", "--inspect-every", "4"],
        ["--backend", "te", "--mesh", "data=1", "--recipe", "current", "--inspect-every", "4"],
        ["--backend", "auto", "--mesh", "data=2", "--recipe", "current", "--inspect-every", "4"],
        ["--backend", "te", "--mesh", "data=2", "--recipe", "current", "--fp8-param", "--microbatches", "2"],
        ["--backend", "te", "--mesh", "data=2", "--microbatches", "2"],
    ],
)
def test_what_transformer_engine_runs_on_meshes(tmp_path, argv):
    config, _ = resolve(options_from(build_parser().parse_args(["train", *MICRO, *argv])), tmp_path)
    with contexts(config):
        check_te_on_mesh(config)


@pytest.mark.parametrize(("size", "text"), [(0, "bytes of text"), (100, "100 bytes of text")])
def test_a_text_that_is_too_short(tmp_path, capsys, size, text):
    (tmp_path / "text").write_text("x" * size)
    assert_refused(*refuse(capsys, tmp_path / "run", "--data", tmp_path / "text"), text, "Give more text")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_text(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert_refused(*refuse(capsys, tmp_path / "run", "--data", tmp_path / "data"), "no text in")


@pytest.mark.skipif(available()[0], reason="Transformer Engine is here")
def test_a_backend_that_is_not_there(tmp_path, capsys):
    assert_refused(*refuse(capsys, tmp_path / "run", "--backend", "te"), "backend 'te' cannot run", available()[1][:30])
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("precious")
    assert_refused(*refuse(capsys, tmp_path / "run"), "is a file; give a folder")
    assert (tmp_path / "run").read_text() == "precious"


def test_an_output_with_another_programs_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2"]}')
    assert_refused(*refuse(capsys, tmp_path), "is not the configuration of a jax-te run", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("latest_checkpointed_iteration.txt", "a checkpoint of Megatron-LM or torch.distributed"),
        ("mp_rank_00/model_optim_rng.pt", "a checkpoint of Megatron-LM or torch.distributed"),
        (".metadata", "a checkpoint of Megatron-LM or torch.distributed"),
        ("model.safetensors", "a model of Hugging Face"),
        ("adapter_model.safetensors", "adapters of PEFT"),
        ("4/state/manifest.ocdbt", "checkpoints of jax-te"),
        ("_CHECKPOINT_METADATA", "checkpoints of jax-te"),
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_an_output_that_holds_a_model(tmp_path, capsys, name, held, begun):
    """The commands that are given the folder could not tell that model from the run's."""
    if begun:  # but without a checkpoint
        configured(tmp_path, *MICRO)
        (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("precious")
    (tmp_path / "config.json").touch(exist_ok=True)  # as a model of Hugging Face has one
    before = contents(tmp_path)
    texts = [f"{tmp_path} holds {held} ({name.split('/')[0]}), ", "could not tell", "give another --output"]
    assert_refused(*refuse(capsys, tmp_path), *texts)
    assert contents(tmp_path) == before
    assert not (tmp_path / ".lock").exists()


def test_a_missing_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "grain", None)
    assert_refused(*refuse(capsys, tmp_path / "run"), "grain", 'pip install -e ".[train]" in a checkout')


@pytest.fixture
def run(trained, tmp_path, capsys):
    """A copy of a finished run, to be damaged."""
    capsys.readouterr()
    return shutil.copytree(trained, tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.costly
def test_an_output_of_another_configuration(run, capsys):
    before = contents(run)
    texts = ["--hidden-size is 32 there, 64 here", "--seed is 0 there, 1 here", "--output"]
    assert_refused(*refuse(capsys, run, "--hidden-size", "64", "--seed", "1"), *texts)
    assert contents(run) == before


@pytest.mark.costly
def test_an_output_of_another_text(run, tmp_path, capsys):
    before = contents(run)
    (tmp_path / "text").write_bytes(Path(TEXT).read_bytes() + b"\n")
    refused = refuse(capsys, run, "--data", tmp_path / "text")
    assert_refused(*refused, f"--data {tmp_path / 'text'} is another text than that of the run, {TEXT}")
    assert contents(run) == before


@pytest.mark.slow
def test_a_text_may_move_and_not_change(run, tmp_path, capsys):
    shutil.copy(TEXT, tmp_path / "text")
    assert main(["train", "--output", str(run), "--steps", "13", "--data", str(tmp_path / "text")]) == 0
    assert json.loads((run / "config.json").read_text())["data"] == str(tmp_path / "text")
    with (tmp_path / "text").open("a") as file:
        file.write("more")
    capsys.readouterr()
    status = main(["train", "--output", str(run), "--steps", "14"])
    assert_refused(status, capsys.readouterr().err, f"--data {tmp_path / 'text'}: the file has changed")


@pytest.fixture
def text(run, tmp_path):
    """The folder of `run`'s text, which may change."""
    folder = tmp_path / "text"
    folder.mkdir()
    shutil.copy(TEXT, folder / "text.py")
    config = read_config(run)
    assert config is not None
    write_config(dataclasses.replace(config, data=str(folder)), run)
    return folder


def end_anew(folder):
    """Change less than the 5 % that are held out: what was trained on is the same."""
    content = (folder / "text.py").read_bytes()
    (folder / "text.py").write_bytes(content[:-1000] + b"Z" * 1000)


def cut(folder):
    """Leave a text whose held-out part was trained on."""
    content = (folder / "text.py").read_bytes()
    (folder / "text.py").write_bytes(content[: len(content) // 2])


def add_a_file(folder):
    shutil.copy(json.__file__, folder / "more.py")


READERS = {
    "train": ["train", "--steps", "14"],
    "eval": ["eval"],
    "precision": ["inspect", "precision", "--recipe", "current"],
    "sensitivity": ["inspect", "sensitivity", "--recipe", "current", "--batches", "1"],
}
"""Commands that read the text of a run."""


def refuse_text(capsys, run, reader):
    """Start a command; return its status and its error, without the line of what it inspects."""
    status = main([*READERS[reader], "--output", str(run)])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return status, "".join(line for line in lines if not line.startswith(f"{run}, step 12, recipe"))


@pytest.mark.costly("eval-cut", "sensitivity-end_anew", "eval-end_anew", "eval-add_a_file", "train-end_anew")
@pytest.mark.parametrize(
    ("reader", "change"), [*((reader, end_anew) for reader in READERS), ("eval", cut), ("eval", add_a_file)]
)
def test_a_held_out_text_that_has_changed(run, text, capsys, reader, change):
    before = contents(run)
    change(text)
    assert_refused(*refuse_text(capsys, run, reader), f"--data {text}", "changed since the run began")
    assert contents(run) == before


def test_a_changed_text_is_evaluated_where_it_is_named(run, text, capsys):
    cut(text)
    assert main(["eval", "--output", str(run), "--data", str(text)]) == 0
    assert f"step 12, on {text}" in capsys.readouterr().err


@pytest.mark.costly("sensitivity")
@pytest.mark.parametrize("reader", READERS)
def test_a_text_that_has_moved(run, text, capsys, reader):
    before = contents(run)
    text.rename(text.with_name("moved"))
    assert_refused(*refuse_text(capsys, run, reader), f"no such file or folder of text: {text}", "--data")
    assert contents(run) == before


def test_checkpoints_without_a_configuration(run, capsys):
    (run / "config.json").unlink()
    assert_refused(*refuse(capsys, run), "checkpoints but no config.json", "--output")


def damage(folder):
    """Overwrite the middle of the largest file."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, trained, capsys):
    damage(run / "checkpoints" / "12")
    assert main(["train", "--output", str(run)]) == 0
    shown = capsys.readouterr()
    assert "resumed after step 8" in shown.out
    assert shown.err.startswith("jax-te: warning: checkpoint step 12")
    assert "step 8 is used instead" in shown.err
    assert shown.err.count("\n") == 1
    assert (run / "checkpoints" / "12.damaged").exists()
    assert records(run) == records(trained)


@pytest.mark.costly
def test_sample_falls_back_too(run, capsys):
    for path in (run / "checkpoints" / "12" / "state").rglob("d/*"):  # all values: it reads the parameters alone
        path.write_bytes(bytes(path.stat().st_size))
    assert main(["sample", "--output", str(run), "--length", "5"]) == 0
    assert "step 8 is used instead" in capsys.readouterr().err


def test_nothing_but_damaged_checkpoints(run, capsys):
    for step in ("4", "8", "12"):
        damage(run / "checkpoints" / step)
    before = contents(run)
    assert_refused(*refuse(capsys, run), "no checkpoint in", "can be read")
    assert contents(run) == before


def test_a_folder_that_another_run_is_using(run, capsys):
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_refused(*refuse(capsys, run), "another jax-te train is running in")


@pytest.mark.costly
def test_a_file_system_without_locks_is_told(run, capsys, monkeypatch):
    def refuse_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse_lock)
    assert main(["train", "--output", str(run)]) == 0
    assert "this file system has no locks" in capsys.readouterr().out


WRITTEN = (".lock", "config.json", "config.json.partial", "metrics.jsonl", "tokenizer.partial", "wandb_id")
WRITTEN_IN_FOLDERS = ("profile/kernel_times.json", "tensorboard/events.out.tfevents.1")


@pytest.mark.parametrize("name", [*WRITTEN, *WRITTEN_IN_FOLDERS])
def test_a_link_in_the_run_folder_does_not_lead_out_of_it(tmp_path, capsys, name):
    outside = tmp_path / "important"
    outside.write_text("{}" if name == "config.json" else "what nobody may lose")
    before = outside.read_bytes()
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(outside)
    status = main(["train", "--output", str(tmp_path / "run"), *MICRO])
    assert_refused(status, capsys.readouterr().err, name, "" if name == "config.json" else "symbolic link")
    assert outside.read_bytes() == before


def test_a_checkpoint_folder_that_leads_nowhere_is_refused_at_the_start(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "unmounted")
    status = main(["train", "--output", str(tmp_path / "run"), *MICRO])
    assert_refused(status, capsys.readouterr().err, "symbolic link", "unmounted")
    assert not (tmp_path / "run" / "config.json").exists()
