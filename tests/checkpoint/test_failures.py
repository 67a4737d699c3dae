"""What a kill, damaged files and a full disk do to the checkpoints of a run."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jax_te._processes import SameNumberError
from jax_te.checkpoint import DamagedCheckpointWarning, TrainCheckpointer
from jax_te.errors import CheckpointMismatchError


def make_state(step: int):
    # Small enough for one file, large enough that the file is mostly values, which no format check covers.
    key = jax.random.key(step)
    return {
        "params": {"w": jax.random.normal(key, (64, 64))},
        "opt": jax.random.normal(key, (4096,)),
        "step": jnp.int32(step),
    }


def described():
    return jax.eval_shape(lambda: make_state(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("saved")
    with TrainCheckpointer(folder) as checkpointer:
        for step in (10, 20):
            checkpointer.save(make_state(step), {"at": step}, step)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {"delete": os.unlink, "truncate": truncate, "zero": zero, "flip": flip}


@pytest.fixture(autouse=True)
def collect_garbage():
    yield
    gc.collect()


@pytest.mark.wide("flip")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_harmless_or_noticed(folder, damage):
    """Each file of the newest checkpoint in turn: the state is that of step 20, or with a warning that of step 10."""
    newest = folder / "20"
    noticed = 0
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        content = file.read_bytes()
        DAMAGE[damage](file)
        with warnings.catch_warnings(record=True) as caught, TrainCheckpointer(folder) as checkpointer:
            warnings.simplefilter("always", DamagedCheckpointWarning)
            state, data_state, step = checkpointer.restore(described())
        assert step in (10, 20)
        assert data_state == {"at": step}
        for one, other in zip(jax.tree.leaves(make_state(step)), jax.tree.leaves(state), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        told = any(issubclass(warning.category, DamagedCheckpointWarning) for warning in caught)
        assert told == (step == 10)
        noticed += told
        file.write_bytes(content)
    # Of what a restore reads: the metadata, the database's manifest, its index, and the values.
    assert noticed >= 4


def damage_newest(folder):
    values = max((path for path in (folder / "20").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(values)


def test_the_log_is_quiet_while_orbax_runs_and_is_left_as_it_was(folder):
    """Orbax's threads log, too: the filter stays until all is written, whether or not somebody waits for the save."""
    logger = logging.getLogger("absl")
    foreign = logger.makeRecord("absl", logging.WARNING, "/x/orbax/checkpoint/y.py", 1, "a user's own save", (), None)
    before = list(logger.filters)
    damage_newest(folder)
    with TrainCheckpointer(folder) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning):
            checkpointer.restore(described())
        assert logger.filters == before
        checkpointer.save(make_state(30), None, 30)
        assert len(logger.filters) == len(before) + 1
        deadline = time.monotonic() + 60.0
        while not logger.filter(foreign):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        checkpointer.wait()
        assert logger.filters == before
        checkpointer.save(make_state(40), None, 40)
    assert logger.filters == before


def process_state():
    """Hooks and filters that all threads of the process share."""
    loggers = [logging.getLogger(name) for name in (None, "absl", "asyncio", "orbax", "jax", "jax_te")]
    settings = [(logger.level, logger.disabled, tuple(logger.filters), tuple(logger.handlers)) for logger in loggers]
    return sys.unraisablehook, sys.excepthook, threading.excepthook, logging.raiseExceptions, settings


@pytest.mark.wide("truncate")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_read_leaves_the_process_as_it_is_for_other_threads_too(folder, damage):
    """While a damaged checkpoint is read, and after that."""
    newest = max((path for path in (folder / "20").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    DAMAGE[damage](newest)
    before, seen, done = process_state(), [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(process_state() == before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    with TrainCheckpointer(folder) as checkpointer:
        watcher.start()
        try:
            with pytest.warns(DamagedCheckpointWarning):
                _, _, step = checkpointer.restore(described())
        finally:
            done.set()
            watcher.join()
    assert step == 10
    assert len(seen) > 3
    assert all(seen)
    assert process_state() == before


def test_the_warning_names_both_and_the_run_goes_on(folder):
    damage_newest(folder)
    with TrainCheckpointer(folder) as checkpointer:
        message = r"checkpoint step 20 in .* is damaged: 1 of 3 arrays fail their checksum, first .*; step 10 is used"
        with pytest.warns(DamagedCheckpointWarning, match=message):
            _, _, step = checkpointer.restore(described())
        assert step == 10
        assert checkpointer.latest_step() == 10
        assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]
        for step in (15, 20):
            checkpointer.save(make_state(step), {"at": step}, step)
    assert sorted(path.name for path in folder.iterdir()) == ["10", "15", "20", "20.damaged"]
    with TrainCheckpointer(folder) as checkpointer:
        assert checkpointer.restore(described())[1] == {"at": 20}


def test_damage_between_two_saves_of_a_run(folder):
    """The writer that holds the folder open notices, too."""
    with TrainCheckpointer(folder) as checkpointer:
        checkpointer.save(make_state(30), {"at": 30}, 30)
        checkpointer.wait()
        flip(max((path for path in (folder / "30").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
        with pytest.warns(DamagedCheckpointWarning, match="step 30 .*; step 20 is used instead"):
            checkpointer.restore(described())
        checkpointer.save(make_state(30), {"at": 31}, 30)
        assert checkpointer.restore(described())[1] == {"at": 31}


def test_damaged_metadata_does_not_stop_a_run_that_does_not_read(folder):
    """Orbax refuses to open a folder with one malformed file in it."""
    file = folder / "20" / "_CHECKPOINT_METADATA"
    file.write_bytes(file.read_bytes().replace(b"init_timestamp", b"init_timesuamp"))
    with TrainCheckpointer(folder) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning, match="step 20"):
            checkpointer.save(make_state(30), {"at": 30}, 30)
        assert checkpointer.latest_step() == 30
    assert (folder / "20.damaged").is_dir()


def test_a_digit_of_the_data_state(folder):
    """It is still JSON, and says something else."""
    file = folder / "20" / "_CHECKPOINT_METADATA"
    content = file.read_bytes()
    assert content.count(b'{"at": 20}') == 1
    file.write_bytes(content.replace(b'{"at": 20}', b'{"at": 21}'))
    with TrainCheckpointer(folder) as checkpointer, pytest.warns(DamagedCheckpointWarning, match="step 20"):
        assert checkpointer.restore(described())[1] == {"at": 10}


def test_nothing_that_can_be_read(folder):
    for step in ("10", "20"):
        shutil.rmtree(folder / step / "state")
        (folder / step / "state").mkdir()
    with (
        TrainCheckpointer(folder) as checkpointer,
        pytest.raises(ValueError, match=r"can be read: step 20: .*; step 10: "),
    ):
        checkpointer.restore(described())
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]


def test_a_mismatch_is_no_damage(folder):
    with TrainCheckpointer(folder) as checkpointer, pytest.raises(CheckpointMismatchError):
        checkpointer.restore({**described(), "step": jax.ShapeDtypeStruct((), jnp.float32)})


RESTORE = """
import sys, jax, jax.numpy as jnp
from jax_te.checkpoint import TrainCheckpointer
part = {str(i): jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(30)}
for _ in range(3):
    with TrainCheckpointer(sys.argv[1]) as checkpointer:
        print(checkpointer.restore({"params": part, "opt": part})[2])
"""


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_warning_on_stderr(tmp_path):
    """And not what Orbax's other reads say, which end at any time after the one that failed."""
    with TrainCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            part = {str(i): jnp.full((512, 512), float(i)) for i in range(30)}
            checkpointer.save({"params": part, "opt": part}, None, step)
    for step, damage in ((2, os.unlink), (3, truncate)):
        for file in (tmp_path / str(step)).glob("*/d/*"):
            damage(file)
    with start(RESTORE, tmp_path, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=120)
    assert output == "1\n" * 3, errors
    for step in (2, 3):  # Python shows a warning once
        assert errors.count(f"DamagedCheckpointWarning: checkpoint step {step} in") == 1
    assert errors.count("\n") <= 4, errors  # the warnings, and from Python 3.13 on the lines of the caller


@pytest.mark.costly("array0-params/a has dtype uint4, which Orbax cannot store")
@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (jax.ShapeDtypeStruct((4,), jnp.uint4), "params/a has dtype uint4, which Orbax cannot store"),
        (jax.ShapeDtypeStruct((0, 3), jnp.float32), r"params/a has shape \(0, 3\), and Orbax stores no empty arrays"),
    ],
)
def test_arrays_that_orbax_cannot_store_are_named_and_leave_nothing(tmp_path, array, reason):
    """A refused save makes no folder, starts no thread of Orbax, and does not rename damaged checkpoints."""
    state, good = {"params": {"a": jnp.zeros(array.shape, array.dtype)}}, {"params": {"a": jnp.zeros(1)}}
    folder = tmp_path / "new"
    threads = set(threading.enumerate())
    with TrainCheckpointer(folder) as checkpointer:
        with pytest.raises(TypeError, match=reason):
            checkpointer.save(state, None, 1)
        assert not folder.exists()
        assert set(threading.enumerate()) <= threads
        checkpointer.save(good, None, 1)
        checkpointer.save(good, None, 2)
    for file in (folder / "2").glob("*/d/*"):
        truncate(file)
    with TrainCheckpointer(folder) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning):
            checkpointer.restore(good)
        before = sorted(folder.iterdir())
        with pytest.raises(TypeError, match=reason):
            checkpointer.save(state, None, 3)
        assert sorted(folder.iterdir()) == before


SAVER = """
import sys, jax, jax.numpy as jnp
from jax_te.checkpoint import TrainCheckpointer
advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
state = {"a": [jnp.zeros((512, 512)) for _ in range(24)], "step": jnp.int32(0)}
with TrainCheckpointer(sys.argv[1], keep=2) as checkpointer:
    for step in range(1, 1000):
        state = advance(state)
        checkpointer.save(state, {"at": step}, step)
        print(step, flush=True)
"""


def start(script, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 50])
def test_kill_9_during_saves_leaves_the_last_good_checkpoint(tmp_path, kills):
    """At moments spread over a save. The newest checkpoint is whole, and no older than the last but one started."""
    description = {
        "a": [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 24,
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    delays = [0.0, 0.09, 0.04, *np.random.default_rng(0).uniform(0.0, 0.3, 47)]
    for attempt, delay in enumerate(delays[:kills]):
        folder = tmp_path / str(attempt)
        with start(SAVER, folder) as process:
            started = [int(line) for line in itertools.islice(process.stdout, 4)][-1]
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            started = max([started, *(int(line) for line in process.stdout if line.endswith("\n"))])
        with TrainCheckpointer(folder, keep=2) as checkpointer:
            state, data_state, step = checkpointer.restore(description)
            assert step >= started - 1
            assert data_state == {"at": step}
            assert int(state["step"]) == step
            assert all(np.all(np.asarray(leaf) == step) for leaf in state["a"])
            checkpointer.save(state, {"at": step + 1}, step + 1)
        # What the kill left of a save or of the deletion of an old checkpoint is gone.
        assert sorted(path.name for path in folder.iterdir()) == sorted([str(step), str(step + 1)])


FULL = """
import resource, signal, sys, jax, jax.numpy as jnp
from jax_te.checkpoint import TrainCheckpointer

state = {"a": jax.random.normal(jax.random.key(0), (512, 512))}
checkpointer = TrainCheckpointer(sys.argv[1])
checkpointer.save(state, {"at": 1}, 1)
checkpointer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # write(2) fails beyond it, as on a full disk
next_save = lambda: checkpointer.save(state, {}, 3)
for surface in (next_save, checkpointer.wait, checkpointer.latest_step, checkpointer.close):
    try:
        checkpointer.save(state, {"at": 2}, 2)
        surface()
        print("no error")
    except OSError as error:
        print(error.errno, error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(checkpointer.latest_step())
checkpointer.save(state, {"at": 4}, 4)
print(checkpointer.latest_step())
checkpointer.close()
"""


@pytest.mark.costly
def test_a_write_that_fails_is_one_oserror_and_keeps_what_there_was(tmp_path):
    with start(FULL, tmp_path, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=120)
    assert not errors  # one line from whoever catches the error is enough
    lines = output.splitlines()
    assert process.returncode == 0, errors[-2000:]
    assert len(lines) == 6, output
    for line in lines[:4]:
        assert line.startswith(f"{errno.EIO} checkpoint step 2 could not be saved: "), line
        assert "checkpoint step 1 is still good" in line
    assert lines[4:] == ["1", "4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


@pytest.mark.costly(
    "[Errno 28] in another language-no space left on the disk; .* step 1 is-ENOSPC",
    "[Errno 17] in those words-Another program seems to save in this folder-EIO",
    "OS error 28: No space left on device-no space left on the disk; .* step 1 is-ENOSPC",
    "[Errno 122] Disk quota exceeded-no space left on the disk; .* step 1 is-ENOSPC",
)
@pytest.mark.parametrize(
    ("cause", "told", "number"),
    [
        (OSError(errno.ENOSPC, "in another language"), "no space left on the disk; .* step 1 is", "ENOSPC"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left on the disk; .* step 1 is", "ENOSPC"),
        (ValueError("OS error 28: No space left on device"), "no space left on the disk; .* step 1 is", "ENOSPC"),
        (OSError(errno.EEXIST, "in those words"), "Another program seems to save in this folder", "EIO"),
        (OSError(errno.EIO, "No space left on device, it seems"), "Free some space, or save elsewhere", "EIO"),
    ],
    ids=str,
)
def test_a_full_disk_is_called_so(cause, told, number, tmp_path, monkeypatch):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(make_state(1), {"at": 1}, 1)
        checkpointer.wait()

        def fail(*args, **kwargs):
            raise ValueError("could not write") from cause

        monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", fail)
        checkpointer.save(make_state(2), {"at": 2}, 2)
        with pytest.raises(OSError, match=rf"step 2 could not be saved: .*{told}") as caught:
            checkpointer.wait()
        assert errno.errorcode[caught.value.errno] == number
        assert caught.value.filename == str(tmp_path)


def test_two_processes_of_one_number_are_not_told_to_free_space(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise SameNumberError(errno.ETIMEDOUT, "two have the same number")

    monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", fail)
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(make_state(1), {"at": 1}, 1)
        with pytest.raises(OSError, match="could not be saved") as caught:
            checkpointer.wait()
    assert "start each with a number of its own" in str(caught.value)
    assert "Free some space" not in str(caught.value)


def test_a_loop_that_asks_at_each_step_is_told_at_once(tmp_path, monkeypatch):
    """`check` does not wait for a save under way, and raises when it has failed."""
    go_on = threading.Event()

    def fail(*args, **options):
        assert go_on.wait(60.0)
        raise OSError(errno.ENOSPC, "No space left on device")

    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.check()
        checkpointer.save(make_state(1), {"at": 1}, 1)
        checkpointer.wait()
        monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", fail)
        checkpointer.save(make_state(2), {"at": 2}, 2)
        checkpointer.check()
        go_on.set()

        def check_again_and_again():
            end = time.monotonic() + 60.0
            while time.monotonic() < end:
                checkpointer.check()

        with pytest.raises(OSError, match=r"step 2 could not be saved: no space left on the disk"):
            check_again_and_again()
        checkpointer.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_saves_keep_no_more_memory_than_those_of_orbax_alone():
    """Which keeps some itself; see docs/troubleshooting.md. Pages and pools of the allocator are the tolerance."""
    script = os.path.join(os.path.dirname(__file__), "orbax_memory.py")
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    kept = [
        float(subprocess.check_output([sys.executable, script, kind, "400"], env=environment, text=True).split()[0])
        for kind in ("ours", "orbax")
    ]
    assert kept[0] < 1.5 * kept[1] + 20.0, kept


def test_a_folder_renamed_to_another_step_is_not_that_step(folder):
    (folder / "20").rename(folder / "99")
    with TrainCheckpointer(folder) as checkpointer:
        with pytest.raises(ValueError, match=r"step 99 .* is that of step 20"):
            checkpointer.restore(described(), step=99)
        with pytest.warns(DamagedCheckpointWarning, match="is that of step 20"):
            state, data_state, step = checkpointer.restore(described())
    assert (data_state, step, int(state["step"])) == ({"at": 10}, 10, 10)
