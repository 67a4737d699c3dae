"""Options without effect are refused: every row of every command that needs something, without what it needs."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from jax_te.cli.bench.options import MOE, QUANTIZED_ATTENTION, TRANSFORMER_LAYER
from jax_te.cli.command_options import (
    A_FOLDER,
    A_GPU,
    A_RUN,
    FROM_FOLDER,
    FROM_MEGATRON,
    FROM_RUN,
    FROM_STEPS,
    RANDOM,
    TO_FOLDER,
    TO_MEGATRON,
    TO_MODEL,
    UPCYCLED,
)
from jax_te.cli.inspect.options import OF_STEPS
from jax_te.cli.launch import PLACE, is_launched
from jax_te.cli.main import main
from jax_te.cli.option_table import flag
from jax_te.cli.option_values import Text
from jax_te.cli.options import (
    EXPERT_RANKS,
    GROUPS,
    RULES,
    SELECTIVE,
    SEVERAL_PROCESSES,
    SOFTMAX,
    TENSOR_RANKS,
    TrainOptions,
)
from jax_te.cli.parser import COMMANDS, build_parser, options_from
from jax_te.cli.resolve import resolve
from tests.support.runs import assert_refused

HUGGINGFACE, TORCH = "model.safetensors", "rank.pt"
"""Names by which `jax-te convert` tells kinds of checkpoints."""

WITHOUT = {
    ("sample", RANDOM): ["--temperature", "0"],
    ("eval", A_RUN): ["--init-from", "x", "--data", "x"],
    ("eval", A_FOLDER): [],
    ("convert", FROM_RUN): ["hf", "new"],
    ("convert", FROM_STEPS): ["hf", "new"],
    ("convert", FROM_MEGATRON): ["hf", "new"],
    ("convert", FROM_FOLDER): [TORCH, "new"],
    ("convert", TO_MEGATRON): ["hf", "new", "--to", "huggingface"],
    ("convert", TO_FOLDER): ["hf", "new", "--to", "megatron"],
    ("convert", TO_MODEL): ["hf", "new", "--to", "peft"],
    ("convert", UPCYCLED): ["hf", "new"],
    ("doctor", A_GPU): [],
    ("inspect sensitivity", "--keep-bf16"): [],
    ("inspect checkpoint", OF_STEPS): ["hf"],
    ("bench layer", MOE): [],
    ("bench layer", TRANSFORMER_LAYER): ["--modules", "layernorm_mlp"],
    ("bench layer", QUANTIZED_ATTENTION): ["--recipes", "none"],
    ("bench model", "--data"): [],
    ("bench attention", "--mesh"): [],
    ("bench attention", QUANTIZED_ATTENTION): [],
    ("bench layer", "--fp8-dpa"): ["--modules", "transformer_layer", "--recipes", "delayed"],
    ("train", EXPERT_RANKS): ["--num-experts", "4", "--mesh", "data=2"],
    ("train", SOFTMAX): ["--num-experts", "4", "--moe-router-score-function", "sigmoid"],
    ("train", SELECTIVE): ["--recompute-granularity", "full"],
    ("train", SEVERAL_PROCESSES): ["--processes", "none"],
    ("train", TENSOR_RANKS): ["--recompute-granularity", "full"],
    ("train", RULES): [],
}
"""Command lines in which a condition is not met, by the command and the condition."""

VALUES = {"architecture": "LlamaForCausalLM", "recompute_modules": "core_attn", "batch_parts": "2"}


def fields_of(command: str) -> list[dataclasses.Field]:
    table = COMMANDS[command]
    tables = [table, *GROUPS.values()] if table is TrainOptions else [table]
    return [field for each in tables for field in dataclasses.fields(each)]


CASES = [
    (command, field.name, condition)
    for command in COMMANDS
    for field in fields_of(command)
    for condition in field.metadata["option"].needs
]


def given(field: dataclasses.Field) -> list[str]:
    """Return an option with another value than its default."""
    row, name = field.metadata["option"], field.name
    if isinstance(row.kind, tuple):
        return [flag(name), next(choice for choice in row.kind if field.default not in (choice, (choice,)))]
    if not isinstance(row.kind, Text):
        return [flag(name)]
    for text in (VALUES.get(name, "3"), "0.5", "x"):
        try:
            row.kind.parse(text)
        except argparse.ArgumentTypeError:
            continue
        return [flag(name), text]
    pytest.fail(f"no value of {name} is known; give it in VALUES")


def test_every_condition_has_a_command_line_without_it():
    assert {(command, condition) for command, _, condition in CASES} == WITHOUT.keys()


@pytest.mark.parametrize(("command", "name", "condition"), CASES, ids=lambda value: value.replace(" ", "_")[:20])
def test_an_option_without_effect_is_refused(command, name, condition, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    for path in (Path("hf") / HUGGINGFACE, Path(TORCH)):
        path.touch()
    (field,) = (field for field in fields_of(command) if field.name == name)
    argv = [*command.split(), *WITHOUT[command, condition], *given(field)]
    assert_refused(main(argv), capsys.readouterr().err, f"{flag(name)} has no effect without {condition}; leave out")
    assert not (tmp_path / "new").exists()


def test_a_launcher_of_one_process_may_give_bounds_of_waits(monkeypatch):
    """The same script starts any number of processes; one without a launcher is by itself."""
    launchers = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
    for name in (*PLACE, *launchers):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched()
    assert not is_launched("none")
    assert is_launched("localhost:1234,1,0")
    for sign in launchers:
        with monkeypatch.context() as patch:
            patch.setenv(sign, "1")
            assert is_launched()


@pytest.mark.parametrize("gemms", ["fprop,dgrad,wgrad", "wgrad,fprop,dgrad"])
def test_a_recipe_without_a_gemm_is_refused(gemms, tmp_path, capsys):
    argv = ["train", "--output", str(tmp_path / "run"), "--recipe", "delayed", "--override-linear-precision", gemms]
    assert_refused(main(argv), capsys.readouterr().err, "leaves no GEMM to --recipe delayed")
    resolve(options_from(build_parser().parse_args([*argv, "--fp8-dpa"])), tmp_path / "run")


@pytest.mark.slow
def test_a_schedule_that_the_mesh_does_not_support_is_refused_before_the_folder_is_written(tmp_path, capsys):
    run = tmp_path / "run"
    small = "--num-layers 2 --hidden-size 16 --ffn-hidden-size 16 --num-heads 2 --seq-len 8 --batch-size 4 --steps 2"
    mesh = "--mesh pipeline=2,context=2 --microbatches 2 --pipeline zero_bubble"
    status = main(["train", "--output", str(run), *small.split(), *mesh.split()])
    assert_refused(status, capsys.readouterr().err.splitlines(keepends=True)[-1], "take the schedule '1f1b'")
    assert {path.name for path in run.iterdir()} <= {".lock"}
