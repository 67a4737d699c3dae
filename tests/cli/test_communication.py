"""``jax-te inspect communication``: what it prints, and that programs of smaller meshes and models say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jax_te.cli import count_communication
from jax_te.cli.count_communication import counted, tables
from jax_te.cli.main import main
from jax_te.cli.resolve import new_config
from jax_te.cli.run_config import RunConfig
from jax_te.sharding import CollectiveCount

SIZES = {"hidden_size": 128, "num_heads": 8, "num_query_groups": 8, "ffn_hidden_size": 256, "params_dtype": "bfloat16"}
SP = {"sequence_parallel": True}


def config(mesh: str, num_layers: int = 2, **options: Any) -> RunConfig:
    return new_config({"preset": "tiny", "mesh": mesh, "num_layers": num_layers} | SIZES | options)


def count(configs: list[RunConfig]) -> list[tuple[CollectiveCount, ...]]:
    """Count in this process, which has eight devices."""
    return [tuple(CollectiveCount(**row) for row in rows) for rows in tables(configs)]


def assert_rules_hold(wanted: RunConfig, note: str) -> None:
    """Assert that the rows that follow from smaller programs are those of the program itself."""
    compiled: list[RunConfig] = []

    def watched(configs: list[RunConfig]) -> list[tuple[CollectiveCount, ...]]:
        compiled.extend(configs)
        return count(configs)

    rows, notes = counted(wanted, watched)
    assert notes == [note]
    assert wanted not in compiled
    (direct,) = count([wanted])
    assert {(row.axes, row.kind): row for row in rows} == {(row.axes, row.kind): row for row in direct}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "few"),
    [
        ("data=2,fsdp=2,tensor=2", {}, (2, 3)),
        ("context=2,tensor=2", SP, (2, 3)),
        ("fsdp=2,tensor=2", {"recipe": "delayed", "fp8_param": True}, (2, 3)),
        ("fsdp=2", {"recompute_granularity": "full", "recompute_num_layers": 2}, (4, 6)),
        (
            "fsdp=2,tensor=2",
            {"recompute_granularity": "full", "recompute_num_layers": 2, "recompute_method": "block"},
            (4, 5),
        ),
        ("fsdp=2", {"recipe": "current", "bf16_layers_start": 1, "bf16_layers_end": 1}, (4, 5)),
        ("pipeline=2,tensor=2", {"microbatches": 4}, (4, 6)),
        ("expert=2", {"num_experts": 4, "moe_layer_freq": 2}, (4, 6)),
    ],
)
def test_layers_in_proportion(mesh: str, options: dict[str, Any], few: tuple[int, int]) -> None:
    note = f"counted with {few[0]} and {few[1]} of 8 layers, the others in proportion"
    assert_rules_hold(config(mesh, 8, **options), note)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_experts": 4, "moe_layer_freq": 2}, {"recompute_granularity": "full", "recompute_num_layers": 2}]
)
def test_patterns_of_layers_on_a_pipeline_in_proportion(options: dict[str, Any]) -> None:
    note = "counted with 8 and 12 of 16 layers, the others in proportion"
    assert_rules_hold(config("pipeline=2", 16, microbatches=2, **options), note)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=8", {}),
        ("data=4,fsdp=2", {}),
        ("data=4,tensor=2", SP | {"recipe": "delayed"}),
        ("data=4,tensor=2", {"microbatches": 4, "batch_size": 32}),
    ],
)
def test_data_ranks_as_larger_groups(mesh: str, options: dict[str, Any]) -> None:
    note = f"counted with data=2, and groups made as large as {mesh[:6]} makes them"
    assert_rules_hold(config(mesh, **options), note)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=8", {}),
        ("tensor=8", {}),
        ("tensor=8", SP | {"recipe": "current"}),
        ("context=8", {}),
        ("context=8", {"cp_comm_type": "all_gather"}),
        ("context=8", {"cp_comm_type": "a2a"}),
        ("context=8", {"cp_load_balanced": True, "microbatches": 2}),
    ],
)
def test_half_and_quarter_of_an_axis(mesh: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_communication, "MAX_DEVICES", 4)
    axis = mesh.removesuffix("=8")
    assert_rules_hold(
        config(mesh, **options), f"counted with {axis}=4 and {axis}=2: bytes a + b / n, numbers a + b * n"
    )


@pytest.mark.slow
def test_4096_devices(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, with half and a quarter of an axis."""
    options = ["--mesh", "data=2,fsdp=32,context=8,tensor=8", "--train-options=--seq-len 128 --batch-size 64"]
    sizes = " --hidden-size 1024 --num-heads 8 --sequence-parallel"
    argv = ["inspect", "communication", "--preset", "tiny", "--json", options[0], options[1], options[2] + sizes]
    assert main(argv) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["mesh"] == {"pipeline": 1, "data": 2, "fsdp": 32, "expert": 1, "context": 8, "tensor": 8}
    assert {tuple(row["axes"]) for row in found["collectives"]} >= {("data", "context"), ("fsdp",), ("tensor",)}
    assert found["seconds"] == pytest.approx(sum(row["seconds"] for row in found["collectives"]))


def ring(size: float, number: int, *axes: str, devices: int) -> CollectiveCount:
    return CollectiveCount(
        axes=axes, kind="all-gather", devices=devices, count=number, launches=number, bytes=round(size)
    )


def made(configs: list[RunConfig]) -> list[tuple[CollectiveCount, ...]]:
    """Rows that follow from the sizes as those of programs do."""
    tables = []
    for each in configs:
        sizes = each.parallel_config()
        assert sizes is not None
        moved = (1000 + 4096 / sizes.fsdp) * each.num_layers
        rows = [ring(moved, 3 * each.num_layers, "fsdp", devices=sizes.fsdp)]
        tables.append((*rows, ring(8 * sizes.fsdp, 1, "data", "fsdp", devices=sizes.data * sizes.fsdp)))
    return tables


def test_what_is_compiled_and_what_follows() -> None:
    seen: list[tuple[str | None, int, int]] = []

    def watched(configs: list[RunConfig]) -> list[tuple[CollectiveCount, ...]]:
        seen.extend((each.mesh, each.num_layers, each.batch_size) for each in configs)
        return made(configs)

    rows, notes = counted(config("data=8,fsdp=64,tensor=2", 10, batch_size=512, ffn_hidden_size=1024), watched)
    mesh = "pipeline=1,data=2,fsdp=64,expert=1,context=1,tensor=2"
    assert seen == [(mesh, 2, 128), (mesh, 3, 128)]
    assert (rows[0].bytes, rows[0].count, rows[0].devices) == (10 * 1064, 30, 64)
    assert rows[1].devices == 512
    assert len(notes) == 2

    seen.clear()
    large = config("fsdp=512,tensor=8", 1, batch_size=512, hidden_size=4096, ffn_hidden_size=4096)
    rows, _ = counted(large, watched)
    others = "expert=1,context=1,tensor=8"
    assert [mesh for mesh, _, _ in seen] == [f"pipeline=1,data=1,fsdp={size},{others}" for size in (256, 128)]
    assert (rows[0].bytes, rows[0].devices) == (1008, 512)


@pytest.mark.parametrize(
    ("mesh", "options", "few"),
    [
        ("expert=2", {"num_experts": 4, "moe_layer_freq": 2}, {4, 6}),
        ("expert=2", {"num_experts": 4, "moe_layer_freq": "[0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"}, {16}),
        ("pipeline=2", {"num_experts": 4, "moe_layer_freq": 2, "microbatches": 2}, {8, 12}),
        (
            "pipeline=2",
            {"recompute_granularity": "full", "recompute_num_layers": 2, "microbatches": 2},
            {8, 12},
        ),
    ],
)
def test_patterns_of_layers_are_compiled_whole(mesh: str, options: dict[str, Any], few: set[int]) -> None:
    """On each stage of a pipeline; of layers that a list tells apart the whole model is compiled."""
    seen: set[int] = set()

    def watched(configs: list[RunConfig]) -> list[tuple[CollectiveCount, ...]]:
        seen.update(each.num_layers for each in configs)
        return [() for _ in configs]

    counted(config(mesh, 16, **options), watched)
    assert seen == few


def test_a_mesh_that_is_too_large_for_the_rules() -> None:
    large = config("fsdp=1024,tensor=8", 1, batch_size=1024, hidden_size=8192, ffn_hidden_size=8192)
    with pytest.raises(ValueError, match="leaves too many devices to count for"):
        counted(large, made)


@pytest.fixture
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_communication, "count_in_process", made)


PRESET = ("inspect", "communication", "--preset", "tiny")


@pytest.mark.usefixtures("without_compiling")
def test_the_table_names_what_it_reckons_with(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--mesh", "data=4,fsdp=2", "--network", "devices_per_host=2,latency=1e-5"]
    assert main([*PRESET, *argv, "--train-options=--recipe delayed"]) == 0
    shown = capsys.readouterr()
    assert shown.err == (
        "preset tiny, train step of 128 examples of 128 tokens in 1 microbatch, recipe delayed, bfloat16, "
        "parameters bfloat16\n"
    )
    table, rest = shown.out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["fsdp", "data*fsdp", "sum"]
    assert rest.splitlines() == [
        "8 devices: pipeline=1, data=4, fsdp=2, expert=1, context=1, tensor=1",
        "network: 2 devices on a host, each sends 450 GB/s there, 50 GB/s to other hosts; 10 us a launch",
        "times: one collective after the other, none overlapping computation",
        "counted with data=2, and groups made as large as data=4 makes them",
        "counted with 2 and 3 of 4 layers, the others in proportion",
    ]


@pytest.mark.usefixtures("without_compiling")
def test_a_run_keeps_its_examples_for_each_rank(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from jax_te.cli.run_files import write_config

    write_config(config("fsdp=2", batch_size=12), tmp_path)
    for mesh, examples in (([], 12), (["--mesh", "data=4,fsdp=2"], 48)):
        assert main(["inspect", "communication", "--output", str(tmp_path), "--json", *mesh]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step"]["batch_size"] == examples
        assert found["sent"] == sum(row["sent"] for row in found["collectives"])


@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (PRESET, "give a --mesh"),
        ((*PRESET, "--mesh", "data=2", "--output", "x"), "--output names a run and --preset a preset"),
        ((*PRESET, "--mesh", "data=2", "--network", "speed=1"), "unknown field 'speed' in 'speed=1'"),
        ((*PRESET, "--mesh", "data=2", "--train-options=--mesh data=4"), "leave --mesh out"),
        ((*PRESET, "--mesh", "data=2", "--train-options=--output x"), "leave --output out"),
        ((*PRESET, "--mesh", "data=2", "--train-options=--save-timeout 3"), "leave --save-timeout out"),
        ((*PRESET, "--mesh", "data=2", "--train-options=--sequence-parallel"), "--sequence-parallel is for tensor"),
        (("inspect", "communication", "--output", "nowhere"), "nowhere holds no run; give a --preset"),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(argv)) == 2
    assert message in capsys.readouterr().err
