"""``jax-te train`` by several processes: the losses of one process, whatever happens to one of them."""

from __future__ import annotations

import re
import signal
import time

import pytest

from jax_te.cli.launch import Launch, find_launch
from tests.support.process_runs import assert_same_losses, ended, started, train, when_recorded
from tests.support.runs import EXPERTS, MICRO, jax_te, records

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS")
VARIABLES += ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        (dict(zip(VARIABLES[:3], ("host:1234", "4", "3"), strict=True)), Launch(3, 4, "host:1234")),
        (dict(zip(VARIABLES[:3], ("host:1234", "1", "0"), strict=True)), None),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "16", "SLURM_PROCID": "9"}, Launch(9)),
        # One process has all of the job's devices, where JAX would take the first alone.
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # A batch script is not a step.
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, Launch(1)),
        ({"JOB_COMPLETION_INDEX": "5"}, Launch(5)),
        (
            {"SLURM_STEP_NODELIST": "n1"} | dict(zip(VARIABLES[:3], ("host:1", "2", "1"), strict=True)),
            Launch(1, 2, "host:1"),
        ),
    ],
)
def test_launchers_are_found(monkeypatch, given, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert find_launch() == expected
    assert find_launch("none") is None
    assert find_launch("other:1,2,0") == Launch(0, 2, "other:1")


@pytest.mark.parametrize(
    ("processes", "given"),
    [("auto", {"JAX_NUM_PROCESSES": "2"}), ("auto", {"JAX_PROCESS_ID": "0"}), ("host:1,2,2", {}), ("host:1,0,0", {})],
)
def test_half_a_place_is_refused(monkeypatch, processes, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        find_launch(processes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the run by one process on one device."""
    output = tmp_path_factory.mktemp("alone")
    finished = jax_te("train", "--output", output, *MICRO)
    assert finished.returncode == 0, finished.stderr
    return output


LONG = ("--steps", "3000", "--decay-steps", "12", "--save-every", "1000", "--eval-every", "6", "--mesh", "data=2")


@pytest.mark.costly
def test_two_processes_stop_together_and_train_to_the_losses_of_one(tmp_path, alone):
    """SIGTERM to the one that does not write: both save the same step, and the run goes on from it."""
    with started(2, tmp_path, *LONG) as running:
        when_recorded(3, tmp_path, running)
        running[1].send_signal(signal.SIGTERM)
        first, second = ended(running)
    assert (first[0], second[0]) == (128 + signal.SIGTERM, 128 + signal.SIGTERM)
    assert "SIGTERM: finishing this step" in second[2]
    assert "SIGTERM" not in first[2]
    step = int(re.search(r"stopped by SIGTERM; step (\d+) is saved", first[1])[1])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert records(tmp_path)[-1]["step"] == step
    first, second = train(2, tmp_path, "--mesh", "data=2", "--steps", str(max(12, step + 2)))
    assert f"resumed after step {step}" in first[1]
    assert "loss.png" in first[1]
    assert not any(word in second[1] for word in ("loading", "model", "step", "sample"))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in alone.iterdir()}
    assert_same_losses(tmp_path, alone, 12)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_resumes(tmp_path, alone, victim):
    with started(2, tmp_path, *LONG, "--save-every", "2") as running:
        when_recorded(5, tmp_path, running)
        running[victim].kill()
        status, _, error = ended(running)[1 - victim]
    assert status != 0
    # The survivor learns it from the heartbeats, from the other's exit status, or from JAX.
    assert any(
        words in error
        for words in ("another process ended or cannot be reached", "was ended from outside", "coordination")
    )
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal())
    first, _ = train(2, tmp_path, "--mesh", "data=2", "--steps", str(max(12, saved + 2)))
    assert f"resumed after step {saved}" in first[1]
    assert_same_losses(tmp_path, alone, 12)


@pytest.mark.slow
def test_a_process_killed_in_a_save_leaves_the_checkpoint_before(tmp_path, alone):
    checkpoints = tmp_path / "checkpoints"
    with started(2, tmp_path, *LONG, "--save-every", "1") as running:
        when_recorded(3, tmp_path, running)
        deadline = time.monotonic() + 240
        # A step's folder has another name until it counts.
        while not any(".orbax-checkpoint-tmp" in path.name for path in checkpoints.iterdir()):
            assert time.monotonic() < deadline
        running[1].kill()
        ended(running)
    saved = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    first, _ = train(2, tmp_path, "--mesh", "data=2", "--steps", str(max(12, saved + 2)))
    assert f"resumed after step {saved}" in first[1]
    assert_same_losses(tmp_path, alone, 12)


@pytest.mark.slow
def test_a_damaged_checkpoint_takes_all_to_the_one_before(tmp_path, alone):
    train(2, tmp_path, "--mesh", "data=2", "--save-every", "4")
    newest = max(
        (path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    first, _ = train(2, tmp_path, "--mesh", "data=2", "--steps", "14")
    assert "resumed after step 8" in first[1]
    assert_same_losses(tmp_path, alone, 12)


@pytest.mark.slow
def test_the_others_wait_for_a_process_that_is_slow(tmp_path, alone):
    with started(2, tmp_path, "--mesh", "data=2") as running:
        when_recorded(3, tmp_path, running)
        running[1].send_signal(signal.SIGSTOP)
        time.sleep(5)
        running[1].send_signal(signal.SIGCONT)
        assert [status for status, _, _ in ended(running)] == [0, 0]
    assert_same_losses(tmp_path, alone)


@pytest.mark.slow
def test_a_start_that_fails_in_one_process_ends_all_with_a_line(tmp_path):
    """The other one may have read its text by then."""
    with started(2, tmp_path, "--mesh", "data=2", others={0: ["--data", str(tmp_path / "none")]}) as running:
        first, second = ended(running)
    assert (first[0], second[0]) == (2, 2)
    assert re.search(r"process 0 of 2: error: no such file or folder", first[2]), first
    assert re.search(r"process 1 of 2: error: process 0: no such file or folder", second[2]), second
    assert not (tmp_path / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (2, 1, "fsdp=2"),
        (2, 1, "tensor=2"),
        (2, 1, "context=2"),
        (2, 2, "data=2,fsdp=2"),
        (2, 2, "tensor=2,context=2"),
        (4, 1, "data=2,tensor=2"),
        (4, 2, "data=2,fsdp=2,tensor=2"),
        (2, 4, "pipeline=2,data=2,tensor=2"),
        (2, 2, "data=2,pipeline=2"),
    ],
)
def test_every_axis_may_cross_processes(tmp_path, alone, count, devices, mesh):
    options = ("--microbatches", "2") if mesh == "data=2,fsdp=2" or "pipeline" in mesh else ()
    options += ("--num-layers", "2") if "pipeline" in mesh else ()
    if options:
        alone = tmp_path / "alone"
        assert jax_te("train", "--output", alone, *MICRO, "--batch-size", "8", *options).returncode == 0
        options += ("--batch-size", "8")
    train(count, tmp_path / "run", "--mesh", mesh, *options, devices=devices)
    assert_same_losses(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh"), [(2, 1, "expert=2"), (2, 2, "expert=2,tensor=2"), (4, 1, "expert=2,fsdp=2")]
)
def test_experts_of_several_processes_resume_and_have_the_losses_of_one(tmp_path, count, devices, mesh):
    experts = (*EXPERTS, "--eval-every", "4")
    assert jax_te("train", "--output", tmp_path / "alone", *MICRO, *experts).returncode == 0
    options = (*experts, "--decay-steps", "12", "--mesh", mesh)
    train(count, tmp_path / "run", *options, "--steps", "8", devices=devices)
    first, *_ = train(count, tmp_path / "run", "--mesh", mesh, "--steps", "12", devices=devices)
    assert "resumed after step 8" in first[1]
    assert_same_losses(tmp_path / "run", tmp_path / "alone")
