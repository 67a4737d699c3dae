"""``jax-te bench``, at sizes that say nothing about speed: its rows, and options that would have no effect."""

import json

import pytest

from jax_te.cli.main import main

SMALL = ["--shape", "4", "32", "64", "4", "128", "--rounds", "2", "--calls", "1", "--backend", "xla"]


def rows(capsys, *argv):
    assert main(["bench", *SMALL, *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_modules_and_recipes(capsys, tmp_path):
    modules = ["layernorm_mlp", "layernorm_linear"]
    found = rows(capsys, "--modules", *modules, "--recipes", "none", "delayed", "--output", str(tmp_path / "rows.json"))
    assert [row["name"] for row in found] == [
        f"jax_te {module} {recipe} (xla)" for module in modules for recipe in ("none", "delayed")
    ]
    assert all(row["ms"] > 0.0 and "collectives" not in row for row in found)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == found


def test_a_mesh(capsys):
    (row,) = rows(capsys, "--mesh", "tensor=4", "--sequence-parallel", "--recipes", "none")
    # Of the layer alone: the loss that is differentiated does not need the last scatter.
    assert (row["collectives"]["all-gather"], row["collectives"]["reduce-scatter"]) == (4, 3)


def test_microbatches(capsys):
    """The counts say something on a GPU only: the compiler for CPUs takes the kernels out of the loop by itself."""
    found = rows(capsys, "--microbatches", "2", "--recipes", "current")
    assert [row["name"] for row in found] == [
        "current, quantized in every microbatch",
        "current, quantized once a step",
    ]
    assert all(row["quantizations_in_loop"] > 0 and row["quantizations_outside"] > 0 for row in found)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--microbatches", "2", "--mesh", "tensor=2"], "--microbatches measures whole train steps; leave out"),
        (["--microbatches", "2", "--modules", "layernorm_mlp"], "--microbatches measures whole train steps"),
        (["--sequence-parallel"], "--sequence-parallel splits activations over tensor ranks"),
        (["--sequence-parallel", "--mesh", "data=2"], "give --mesh with tensor=N"),
    ],
)
def test_options_without_effect_are_refused(capsys, argv, message):
    assert main(["bench", *SMALL, *argv]) == 2
    assert message in capsys.readouterr().err
