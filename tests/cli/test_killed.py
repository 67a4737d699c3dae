"""Runs that are killed, stopped, or out of disk, and what a restart makes of them: nothing is lost, bit for bit."""

import contextlib
import dataclasses
import re
import shlex
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import abstract_state, contexts
from jax_te.cli.run_files import read_config
from tests.support.process_runs import ended, started, train
from tests.support.runs import EXPERTS, MICRO, command, jax_te, records

LONG = [*MICRO, "--steps", "60", "--save-every", "5", "--eval-every", "20"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Records of a run that was never stopped."""
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    finished = jax_te("train", "--output", output, *LONG)
    assert finished.returncode == 0, finished.stderr
    return records(output)


def signal_when(condition, number, output, *argv):
    """Start a run, send it a signal when the condition on its folder holds, and return it ended."""
    argv, options = command("train", "--output", output, *argv)
    process = subprocess.Popen(argv, **options)
    deadline = time.monotonic() + 240
    while not condition(output):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    out, error = process.communicate(timeout=240)
    return process.returncode, out, error


def recorded(count):
    """Whether so many steps are in the metrics file, an unfinished last line not counted."""

    def condition(output):
        with contextlib.suppress(FileNotFoundError):
            return (output / "metrics.jsonl").read_bytes().count(b'"loss"') >= count
        return False

    return condition


def saving(step):
    """Whether a checkpoint of this step or a later one is being written: it has a longer name until it is whole."""

    def condition(output):
        with contextlib.suppress(FileNotFoundError):
            names = [path.name for path in (output / "checkpoints").iterdir()]
            partial = [re.match(r"(\d+)\.orbax", name) for name in names]
            return any(match and int(match[1]) >= step for match in partial)
        return False

    return condition


def since(seconds, condition=lambda output: True):
    """Whether a condition, or the process's start, was so long ago."""
    first = []

    def later(output):
        if not first and condition(output):
            first.append(time.monotonic())
        return bool(first) and time.monotonic() >= first[0] + seconds

    return later


def last_saved(output):
    return max((int(path.name) for path in output.glob("checkpoints/*") if path.name.isdecimal()), default=0)


def resume(output):
    finished = jax_te("train", "--output", output)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path, unbroken):
    status, _, _ = signal_when(recorded(13), signal.SIGKILL, tmp_path, *LONG)
    assert status == -signal.SIGKILL
    saved = last_saved(tmp_path)
    assert 0 < saved < 60
    assert f"resumed after step {saved}" in resume(tmp_path)
    assert records(tmp_path) == unbroken


@pytest.mark.costly("20", slow=["5", "40"])
@pytest.mark.parametrize("step", [5, 20, 40])
def test_killed_during_a_save(tmp_path, unbroken, step):
    status, _, _ = signal_when(saving(step), signal.SIGKILL, tmp_path, *LONG)
    assert status == -signal.SIGKILL
    saved = last_saved(tmp_path)
    assert saved < 60
    shown = resume(tmp_path)
    assert (f"resumed after step {saved}" if saved else "a new run") in shown
    assert records(tmp_path) == unbroken


def saved_state(output):
    """The newest checkpoint: its step and the bits of its arrays."""
    config = read_config(output)
    with contexts(config), TrainCheckpointer(output / "checkpoints") as checkpointer:
        state, data, step = checkpointer.restore(abstract_state(config))
    state = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    return step, data, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


BOUND = 20.0
"""Seconds of each bound of the runs of several processes, on a machine that does other things, too."""


def killed_at(moment, output, count, victim, *argv):
    """Start a run, kill one of its processes at a moment, and return what all of them said.

    The others end by themselves, within their bound.
    """
    bounds = ("--start-timeout", BOUND, "--save-timeout", BOUND, "--step-timeout", BOUND) if count > 1 else ()
    with started(count, output, *map(str, (*argv, *bounds))) as running:
        deadline = time.monotonic() + 240
        while not moment(output):
            assert all(process.poll() is None for process in running), ended(running)
            assert time.monotonic() < deadline
            time.sleep(0.001)
        running[victim].kill()
        begin = time.monotonic()
        found = ended(running)
        taken = time.monotonic() - begin
    assert taken < 2 * BOUND, f"the others ended {taken:.0f} s after process {victim}: {found}"
    assert found[victim][0] == -signal.SIGKILL, found
    assert all(status not in (0, None) for status, _, _ in found), found
    return found


def options_of(count, experts):
    """Options of the runs that are killed, but for the number of steps."""
    mesh = ("--mesh", f"{'expert' if experts else 'data'}={count}") if count > 1 else ()
    options = ("--recipe", "delayed", "--dropout", "0.1", "--save-every", "5", "--eval-every", "20")
    return *options, *mesh, *(EXPERTS if experts else ()), "--decay-steps", "400", "--steps"


def kill_often(output, count, kills, random, experts):
    """Start a run again and again, and kill one of its processes at a random moment: each start goes on."""
    start = 10.0
    for kill in range(kills):
        before, lines = last_saved(output), len(records(output))
        moments = {
            "start": since(random.uniform(0.0, start)),
            "step": since(random.uniform(0.0, 0.05), recorded(lines + random.integers(1, 9))),
            # Of the second save of a process: unfinished ones are left of the process before it.
            "save": since(random.uniform(0.0, 0.2), saving(before + 6)),
        }
        moment, victim = random.choice(list(moments)), int(random.integers(count))
        begin = time.monotonic()
        found = killed_at(moments[moment], output, count, victim, *options_of(count, experts), "1000000")
        print(
            f"kill {kill + 1} of {kills}: process {victim} of {count}, {moment}; saved {last_saved(output)}", flush=True
        )
        assert not any("damaged" in error for _, _, error in found), found
        if moment != "start":
            start = time.monotonic() - begin  # about how long starts take, on this machine and with what is cached
        resumed = re.search(r"resumed after step (\d+)|a new run", found[0][1])
        assert resumed is None or int(resumed[1] or 0) == before
        assert last_saved(output) >= before


def assert_as_unbroken(output, unbroken, count, experts):
    """The run, taken to its end, is bit for bit one that nothing happened to."""
    steps = str(last_saved(output) // 20 * 20 + 20)
    for folder in (output, unbroken):
        train(count, folder, *options_of(count, experts), steps)
    assert records(output) == records(unbroken)
    assert saved_state(output) == saved_state(unbroken)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "kills", "experts"),
    [(1, 25, False), (2, 25, False), (4, 10, False), (2, 10, True)],
    ids=["one", "two", "four", "experts"],
)
def test_kills_at_random_moments_lose_nothing(tmp_path, monkeypatch, count, kills, experts):
    """While the run starts, takes steps or saves."""
    # Kills leave unfinished files in a cache of compiled programs, and other tests share theirs.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    kill_often(tmp_path / "killed", count, kills, np.random.default_rng(count), experts)
    assert last_saved(tmp_path / "killed") >= 2 * kills  # starts alone would show little
    assert_as_unbroken(tmp_path / "killed", tmp_path / "unbroken", count, experts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_killed_under_a_recipe(tmp_path, recipe):
    options = [*LONG, "--recipe", recipe, "--dropout", "0.1", "--microbatches", "2"]
    assert jax_te("train", "--output", tmp_path / "unbroken", *options).returncode == 0
    signal_when(recorded(23), signal.SIGKILL, tmp_path / "killed", *options)
    resume(tmp_path / "killed")
    assert records(tmp_path / "killed") == records(tmp_path / "unbroken")


@pytest.mark.slow
def test_sigterm_saves_and_says_so(tmp_path, unbroken):
    status, out, error = signal_when(recorded(8), signal.SIGTERM, tmp_path, *LONG)
    assert status == 128 + signal.SIGTERM
    step = int(re.search(r"stopped by SIGTERM; step (\d+) is saved", out)[1])
    assert step == last_saved(tmp_path) == records(tmp_path)[-1]["step"]
    assert "SIGTERM: finishing this step and saving" in error
    assert f"resumed after step {step}" in resume(tmp_path)
    assert records(tmp_path) == unbroken


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_its_checkpoints_whole(tmp_path, unbroken):
    mount = 'mount -t tmpfs -o size=4m none . && cd "$PWD"'
    unshare = ["unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], cwd=tmp_path, check=False).returncode:
        pytest.skip("no permission to mount a small disk")
    jax_te, options = command()
    first, again = (
        shlex.join([*jax_te, *argv]) for argv in (["train", "--output", "run", *LONG], ["train", "--output", "run"])
    )
    script = f"""{mount}
        {first} --steps 5 --decay-steps 60 || exit 90
        head -c 100m /dev/zero > filler 2> /dev/null  # until nothing fits
        {again} --steps 60 2> /dev/shm/error.$$ && exit 91
        status=$?
        cat /dev/shm/error.$$ >&2; rm -f /dev/shm/error.$$
        [ $status = 2 ] || exit 92
        rm filler
        {again} || exit 93
        cp run/metrics.jsonl {shlex.quote(str(tmp_path))}.jsonl
    """
    finished = subprocess.run([*unshare, script], cwd=tmp_path, check=False, timeout=600, **options)
    assert finished.returncode == 0, finished
