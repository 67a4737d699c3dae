"""Runs of several processes of which one is stopped, slow, missing or cannot write: who waits says so, and ends."""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jax_te._processes import Heartbeats, heartbeats
from jax_te.checkpoint import TrainCheckpointer
from jax_te.checkpoint import checkpointer as checkpointer_module
from jax_te.checkpoint.write import size_of_save
from jax_te.cli.launch import Launch
from jax_te.cli.rendezvous import rendezvous
from tests.support.process_runs import FILES_HANG, KILLED_AT_START, SLOW_STEP, ended, started, when_recorded
from tests.support.processes import run_processes

LONG = ("--steps", "100000", "--decay-steps", "12", "--eval-every", "1000", "--mesh", "data=2")


def timed(running):
    """Return what the processes said, and the seconds until the last ended."""
    begin = time.monotonic()
    return ended(running), time.monotonic() - begin


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Heartbeats by themselves, in threads of this process.


@pytest.fixture
def two(tmp_path):
    """Heartbeats of two processes with bounds of 0.4 s."""
    with (
        Heartbeats(tmp_path / "heartbeats", "run", 0, 2, (0.4,)) as first,
        Heartbeats(tmp_path / "heartbeats", "run", 1, 2, (0.4,)) as second,
    ):
        yield first, second


def test_a_process_that_waits_shows_no_progress_and_one_that_gets_on_does(two):
    first, second = two
    for one in two:
        one.begin("step 1", waits=True)
    second.begin("step 2", waits=True)
    for _ in range(10):
        second.begin("more", waits=True)
        time.sleep(0.1)
        assert first.find_problem(0.4) is None
        assert second.find_problem(0.4) is None
    wait_until(lambda: first.find_problem(0.4) and second.find_problem(0.4), 5.0)
    assert first.find_problem(0.4) == "no process has made progress for 0.4 s: process 0 in step 1, process 1 in more"
    assert first.lost_process(0.4) is None  # both are there
    assert second.processes_behind() == [(0, "step 1")]
    assert first.processes_behind() == []


@pytest.mark.costly
def test_time_of_the_cpu_counts_while_a_process_does_not_wait(two):
    first, second = two
    first.begin("step 1", waits=True)
    second.begin("step 1, which it compiles")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # holds the CPU as a compiler does
        sum(range(10_000))
        assert first.find_problem(0.4) is None
    second.begin("a wait", waits=True)
    wait_until(lambda: first.find_problem(0.4), 5.0)


def test_an_error_reaches_the_others_at_once_and_heartbeats_leave_nothing(tmp_path):
    three = [Heartbeats(tmp_path / "heartbeats", "run", index, 3, (600.0, 3.0)) for index in range(3)]
    with three[0] as first, three[1] as second, three[2] as third:
        time.sleep(1.0)
        second.fail("process 1: the disk is full")
        wait_until(lambda: first.reported_error() and third.reported_error(), 5.0)
        assert first.reported_error() == third.reported_error() == "process 1: the disk is full"
        assert first.lost_process(0.4) == first.reported_error()
    for run in ("next", "last"):  # what an error left goes at the next start
        with Heartbeats(tmp_path / "heartbeats", run, 0, 1, (1.0,)):
            assert {path.name.split(".")[0] for path in (tmp_path / "heartbeats").iterdir()} == {run}
    assert not (tmp_path / "heartbeats").exists()


def test_heartbeats_go_on_where_a_save_cannot_be_measured(two):
    """As in a folder that is renamed while it is listed."""

    def measured():
        raise FileNotFoundError("1.orbax-checkpoint-tmp")

    first, second = two
    first.measure(measured)
    for _ in range(10):
        second.begin("more")
        time.sleep(0.1)
        assert first.find_problem(0.4) is None
        assert second.find_problem(0.4) is None


def test_an_end_waits_for_a_file_system_that_hangs_with_a_bound(tmp_path, monkeypatch):
    hangs, answers, answer = threading.Event(), threading.Event(), os.open

    def hanging(path, *args, **options):
        if hangs.is_set() and tmp_path.name in str(path):
            answers.wait(60.0)
        return answer(path, *args, **options)

    monkeypatch.setattr(os, "open", hanging)
    heartbeats = Heartbeats(tmp_path, "run", 0, 2, (0.5,))
    heartbeats.start()
    hangs.set()
    time.sleep(0.2)  # the thread of the heartbeats is in a call by now
    begin = time.monotonic()
    heartbeats.fail("the disk hangs")
    heartbeats.stop()
    assert time.monotonic() - begin < 10.0
    answers.set()


def test_the_size_of_a_save_is_measured_while_its_folders_go(tmp_path, monkeypatch):
    """Python 3.11's Path.glob raises in a folder that is removed while it is listed."""
    part = tmp_path / "1.orbax" / "state"
    part.mkdir(parents=True)
    (part / "piece").write_bytes(bytes(10))
    scandir = os.scandir

    def of_a_folder_that_goes(path):
        if os.fspath(path) == str(part):
            raise FileNotFoundError(path)
        return scandir(path)

    before = size_of_save(tmp_path, 1)
    (part / "piece").write_bytes(bytes(20))
    assert size_of_save(tmp_path, 1) != before
    monkeypatch.setattr(os, "scandir", of_a_folder_that_goes)
    size_of_save(tmp_path, 1)


KILLED = """
import os, pathlib, signal, sys
from jax_te._processes import Heartbeats
Heartbeats(pathlib.Path(sys.argv[1]), "run", 1, 2, (600.0,)).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


NO_LOCKS = """
import fcntl
def refuse(*_):
    raise OSError("no locks")
fcntl.flock = refuse
"""


@pytest.mark.costly("locks")
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_process_killed_right_after_its_first_heartbeat_is_found_at_once(tmp_path, locks):
    """Whose lock nobody has seen held. Without locks nobody can tell."""
    folder = tmp_path / "heartbeats"
    script = KILLED if locks else NO_LOCKS + KILLED
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script, folder], env=environment, check=False)
    with Heartbeats(folder, "run", 0, 2, (2.0,)) as first:
        if locks:
            wait_until(first.reported_error, 5.0)
            assert first.reported_error() == "process 1 was ended from outside, in its start"
        else:
            time.sleep(0.6)
            assert first.reported_error() is None


def test_a_lock_that_another_one_holds_is_waited_for_with_a_bound(tmp_path, monkeypatch):
    """One that looks at it for an instant, and one that has the same number."""
    folder = tmp_path / "heartbeats"
    path = folder / "run.0.lock"
    folder.mkdir()
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        with Heartbeats(folder, "run", 0, 1, (2.0,)) as first:
            assert first.reported_error() is None
    folder.mkdir()
    monkeypatch.setattr(heartbeats, "_LOCKING", 0.1)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="two have the same number"):
            Heartbeats(folder, "run", 0, 1, (2.0,)).start()


# How processes find each other.


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_first_process_says_for_whom_it_waits():
    address, said = f"127.0.0.1:{free_port()}", []
    comes = threading.Thread(target=rendezvous, args=(Launch(2, 3, address), 20.0, said.append))
    comes.start()
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"2 of 3 processes came to {address}, and none for 2 s; missing: 1"):
        rendezvous(Launch(0, 3, address), 2.0, said.append)
    assert time.monotonic() - begin < 6.0
    assert f"waiting for 3 processes at {address}: 2 are there, not 1" in said
    others = [
        threading.Thread(target=rendezvous, args=(Launch(index, 3, address), 20.0, said.append)) for index in (0, 1)
    ]
    for thread in others:
        thread.start()
    for thread in (*others, comes):  # which has gone on asking
        thread.join(20.0)
        assert not thread.is_alive()


def test_one_that_comes_again_and_again_does_not_bring_another():
    """Such as a process that fails early, and that its launcher restarts."""
    address, over = f"127.0.0.1:{free_port()}", threading.Event()
    host, port = address.split(":")

    def come_again():
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as link:
                link.sendall(b"jax_te 1 3\n")
                over.wait(0.1)
            over.wait(0.2)

    comes = threading.Thread(target=come_again)
    comes.start()
    begin = time.monotonic()
    with pytest.raises(ValueError, match="of 3 processes came to"):
        rendezvous(Launch(0, 3, address), 2.0, print)
    assert time.monotonic() - begin < 10.0
    over.set()
    comes.join()


@pytest.mark.parametrize("listens", [False, True])
def test_a_first_process_that_does_not_answer_is_an_error(listens):
    """It is not there, or it was stopped and its port still takes calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        begin = time.monotonic()
        with pytest.raises(ValueError, match=f"{address} .* for 1 s. Start process 0"):
            rendezvous(Launch(1, 2, address), 1.0, print)
        assert time.monotonic() - begin < 10.0


# Saves of a loop of one's own.


def state():
    mesh = jax.make_mesh((2,), ("x",))
    values = np.arange(8192, dtype=np.float32).reshape(2, 4096)
    return {"w": jax.make_array_from_callback((2, 4096), jax.NamedSharding(mesh, jax.P("x")), lambda at: values[at])}


def save_and_wait(checkpointer, array, step):
    checkpointer.save(array, None, step)
    checkpointer.wait()


def save_with_a_fault(folder, fault):
    """Return the error of a second save, and how long it took; the first one goes well."""
    checkpointer, array = TrainCheckpointer(folder, timeout=2.0), state()
    checkpointer.save(array, None, 1)
    checkpointer.wait()
    if jax.process_index() == 1:
        if fault == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        else:
            # This process goes no further, as one whose disk hangs.
            checkpointer_module.call_orbax = lambda *_: time.sleep(600)
    begin = time.monotonic()
    with pytest.raises(OSError, match="checkpoint step 2 could not be saved") as caught, checkpointer:
        save_and_wait(checkpointer, array, 2)
    result, seconds = str(caught.value), time.monotonic() - begin
    (folder / f"{jax.process_index()}.done").touch()
    wait_until(lambda: all((folder / f"{index}.done").exists() for index in range(2)))
    (folder / f"{jax.process_index()}.result").write_text(f"{seconds}\n{result}")
    if jax.process_index() == 0:
        time.sleep(1.0)
    os._exit(0)  # as docs/checkpoints.md says: Orbax's threads wait still


@pytest.mark.costly(slow=("size-File too large",))
@pytest.mark.parametrize(("fault", "expected"), [("size", "File too large"), ("hangs", "")])
def test_a_process_that_cannot_write_its_part_is_an_error_in_all(tmp_path, fault, expected):
    with pytest.raises(FileNotFoundError):  # the harness misses the results of processes that end at once
        run_processes(2, save_with_a_fault, (tmp_path, fault))
    for index in range(2):
        seconds, text = (tmp_path / f"{index}.result").read_text().split("\n", 1)
        assert float(seconds) < 8.0
        assert "checkpoint step 1 is still good" in text or len(text) > 290
        assert expected in text
    if fault == "size":
        assert (
            "process 1: checkpoint step 2" in text
            or "process 1: checkpoint step 2" in (tmp_path / "0.result").read_text()
        )


def save_beside_a_link(folder):
    with TrainCheckpointer(folder, timeout=2.0) as checkpointer:
        checkpointer.save(state(), None, 1)


@pytest.mark.slow
def test_a_link_in_the_place_of_heartbeats_is_named(tmp_path):
    (tmp_path / ".processes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"LinkedFolderError: .*\.processes is a symbolic link.*; remove it"):
        run_processes(2, save_beside_a_link, (tmp_path,))


def save_slowly(folder, seconds):
    """Save with a folder that grows slowly before process 1's part is written."""
    write = checkpointer_module.call_orbax

    def slow(writer, step, *args):
        part = folder / f"{step}.slow" / "state" / f"ocdbt.process_{jax.process_index()}" / "d"
        part.mkdir(parents=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with (part / "piece").open("ab") as file:
                file.write(bytes(1000))
            time.sleep(0.2)
        return write(writer, step, *args)

    if jax.process_index() == 1:
        checkpointer_module.call_orbax = slow
    begin = time.monotonic()
    with TrainCheckpointer(folder, timeout=2.0) as checkpointer:
        checkpointer.save(state(), None, 1)
        assert checkpointer.latest_step() == 1
    return time.monotonic() - begin


@pytest.mark.slow
def test_a_save_of_three_times_its_bound_that_gets_on_is_whole(tmp_path):
    finished = run_processes(2, save_slowly, (tmp_path, 6.0))
    assert min(process.result for process in finished) > 6.0


def save_interrupted(folder):
    """Interrupt a save that waits for Orbax to begin; return the step restored, and whether it is what was saved."""
    write, goes_on = checkpointer_module.call_orbax, threading.Event()

    def interrupt(*args):
        time.sleep(0.2)  # the main thread waits by now
        _thread.interrupt_main()
        assert goes_on.wait(30.0)
        return write(*args)

    checkpointer_module.call_orbax = interrupt
    with TrainCheckpointer(folder, timeout=30.0) as checkpointer:
        saved = state()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(saved, None, 1)
        goes_on.set()
        checkpointer.wait()
        restored, _, step = checkpointer.restore(saved)
    same = all(
        np.array_equal(one.data, other.data)
        for one, other in zip(restored["w"].addressable_shards, saved["w"].addressable_shards, strict=True)
    )
    return step, same


@pytest.mark.slow
def test_a_save_that_is_interrupted_while_it_waits_goes_on(tmp_path):
    assert [finished.result for finished in run_processes(2, save_interrupted, (tmp_path,))] == [(1, True)] * 2


# Runs of jax-te train.


@pytest.mark.costly(slow=["output"])
@pytest.mark.parametrize("bounded", ["start", "output"])
def test_a_start_that_cannot_be_ends_with_a_line(tmp_path, bounded):
    if bounded == "start":
        with started(2, tmp_path, *LONG, "--start-timeout", "4", only=[0]) as running:
            ((status, out, error),) = ended(running)
        assert status == 2
        assert re.search(r"waiting for 2 processes at 127.0.0.1:\d+: 1 are there, not 1", out)
        assert re.fullmatch(r"jax-te: error: 1 of 2 processes came to .* missing: 1\. Start .*\n", error), error
        return
    with started(2, tmp_path / "one", *LONG, others={1: ["--output", tmp_path / "other"]}) as running:
        found = ended(running)
    assert [status for status, _, _ in found] == [2, 2], found
    for _, _, error in found:
        assert re.search(r"--output \S*/other is not the folder of process 0", error), found
    assert not any(path.name.startswith(".") for path in (tmp_path / "one").iterdir())


@pytest.mark.costly
def test_options_that_differ_between_processes_are_named(tmp_path):
    others = {1: ["--learning-rate", "1e-5", "--seed", "3"]}
    with started(2, tmp_path / "run", *LONG, others=others) as running:
        found = ended(running)
    assert [status for status, _, _ in found] == [2, 2], found
    for _, _, error in found:
        assert "process 1 has another --learning-rate, --min-learning-rate, --seed than process 0" in error
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_process_killed_before_it_tells_its_devices_ends_the_others_within_the_bound(tmp_path):
    with started(2, tmp_path, *LONG, "--start-timeout", "5", programs={1: KILLED_AT_START}) as running:
        (survivor, _), seconds = timed(running)
    status, _, error = survivor
    assert status == 2, error
    assert seconds < 30.0  # imports, the bound, and the time for the others' lines
    assert "process 0 of 2: error: the processes of the run have found each other, and now one does not" in error


@pytest.mark.costly("killed", slow=["stopped"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_process_that_is_stopped_or_killed_ends_the_others_within_the_bound(tmp_path, number):
    """Saves are under way at almost every moment."""
    bounds = ("--step-timeout", "4", "--save-timeout", "4", "--save-every", "1")
    with started(2, tmp_path, *LONG, *bounds) as running:
        when_recorded(5, tmp_path, running)
        running[1].send_signal(number)
        (found,), seconds = timed(running[:1])
    status, _, error = found
    assert status == 2, found
    assert seconds < 12.0
    line = r"jax-te: process 0 of 2: error: .*(process 1|another process).*\n"
    assert re.fullmatch(rf"(jax-te: waiting for .*\n)*{line}", error), error


@pytest.mark.slow
def test_processes_whose_shared_folder_hangs_end_within_the_bound(tmp_path):
    sign = tmp_path / "hang"
    program = FILES_HANG.format(sign=str(sign))
    bounds = ("--step-timeout", "4", "--save-timeout", "4")
    with started(2, tmp_path / "run", *LONG, *bounds, programs={0: program, 1: program}) as running:
        when_recorded(5, tmp_path / "run", running)
        sign.touch()
        found, seconds = timed(running)
    assert [status for status, _, _ in found] == [2, 2], found
    assert seconds < 30.0
    assert any("heartbeats cannot be written" in error for _, _, error in found), found


@pytest.mark.slow
def test_a_run_whose_process_cannot_write_ends_in_all_with_its_reason(tmp_path):
    with started(2, tmp_path, *LONG, "--save-every", "20") as running:
        when_recorded(5, tmp_path, running)
        resource.prlimit(running[1].pid, resource.RLIMIT_FSIZE, (3000, 3000))
        found, seconds = timed(running)
    assert [status for status, _, _ in found] == [2, 2], found
    assert seconds < 30.0
    assert re.search(r"process 1: .*checkpoint step \d+ could not be saved: .*File too large", found[0][2]), found
    assert re.search(r"process 1 of 2: error: .*File too large", found[1][2]), found


@pytest.mark.slow
def test_a_first_compilation_longer_than_the_bound_does_not_end_the_run(tmp_path):
    with started(
        2, tmp_path, "--mesh", "data=2", "--step-timeout", "4", programs={1: SLOW_STEP.format(seconds=15)}
    ) as running:
        found = ended(running)
    assert [status for status, _, _ in found] == [0, 0], found
    assert re.search(r"waiting for process 1 \(step 1, which it starts or compiles\)", found[0][2]), found
    for _, out, _ in found:
        assert "Gloo" not in out


@pytest.mark.slow
def test_texts_that_differ_in_the_held_out_part_alone_are_refused(tmp_path):
    """As on two hosts: one name, and another file behind it in each process."""
    folders = {index: tmp_path / str(index) for index in range(2)}
    for index, folder in folders.items():
        folder.mkdir()
        (folder / "text").write_text("some words of a text\n" * 2000 + f"end {index}")
    argv = ("--mesh", "data=2", "--data", "/proc/self/cwd/text")
    with started(2, tmp_path / "run", *argv, cwd=folders) as running:
        found = ended(running)
    assert [status for status, _, _ in found] == [2, 2], found
    for _, _, error in found:
        assert "process 1 has another text of --data than process 0" in error
