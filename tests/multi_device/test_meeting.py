"""Meetings of three processes: all go on, or all learn why they do not; a failed call does not disturb later ones."""

from __future__ import annotations

import errno
import os
import signal
import time

import jax
import pytest

from jax_te._processes import Meetings, gather_texts, meeting
from jax_te._processes import gather as gathering
from jax_te._processes.meeting import MissedMeeting
from tests.support.processes import run_processes


def come_too_late():
    """Return what each is told when process 2 comes later than the others wait."""
    with Meetings("save") as meetings:
        meetings.meet()  # the start of the processes is left out
        meeting._BOUND = 0.5 if jax.process_index() < 2 else 60.0
        if jax.process_index() == 2:
            time.sleep(2.0)
        with pytest.raises(MissedMeeting) as told:
            meetings.meet()
    meeting._BOUND = 60.0
    return str(told.value)


def gather():
    """Return what all told each other, and what each is told when process 1 does not come."""
    texts = [gather_texts(f"{jax.process_index()}ü" * length) for length in (1, 0, 300)]
    process, told = jax.process_index(), ""
    with Meetings("gathered") as meetings:
        meetings.meet()
        gathering._BOUND = 0.5
        if process != 1:
            with pytest.raises(MissedMeeting) as error:
                gather_texts("here")
            told = str(error.value)
        meetings.meet()
    if process == 1:
        with pytest.raises(MissedMeeting):  # in time for none
            gather_texts("here")
    gathering._BOUND = 60.0
    return texts, told, gather_texts(str(process))


def fail_between(index):
    with Meetings("save") as meetings:
        meetings.meet()
        if jax.process_index() == index:
            raise OSError(errno.ETIMEDOUT, "of a file system, which Python makes a TimeoutError: \udcff")
        meetings.meet()


def fail(index):
    """Return what each is told when one process fails between two meetings, and goes on to another call."""
    with pytest.raises(OSError, match="of a file system") as told:
        fail_between(index)
    with Meetings("save") as again, Meetings("another") as other:
        for _ in range(3):
            again.meet()
            other.meet()
    return str(told.value)


def wait_for_a_stopped_one(folder):
    """Return what the others are told when process 0, which has the store, is stopped; later calls meet it again."""
    process, told = jax.process_index(), ""
    with Meetings("stopped") as meetings:
        meetings.meet()
        if process == 0:
            wait_for(folder, "met 1", "met 2")  # what process 0 has told them has arrived
            (folder / "number").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            (folder / f"met {process}").touch()
            wait_for(folder, "number")
            time.sleep(0.5)  # until the signal has come
            meeting._BOUND = meeting._ANSWER = 0.5
            with pytest.raises(MissedMeeting) as error:
                meetings.meet()
            told = str(error.value)
            (folder / f"told {process}").touch()
            wait_for(folder, "told 1", "told 2")
            os.kill(int((folder / "number").read_text()), signal.SIGCONT)
    meeting._BOUND = 60.0
    with Meetings("stopped") as meetings:
        meetings.meet()
    return told


def wait_for(folder, *names):
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def share_texts():
    """Return texts that all have, and what process 0 is told that shares one process 1 does not come for."""
    process, told = jax.process_index(), ""
    with Meetings("share") as meetings:
        shared = [meetings.share(f"{process}ü" * length, source) for length, source in ((300_000, 1), (0, 0), (1, 0))]
    if process == 0:
        with pytest.raises(MissedMeeting) as error, Meetings("alone", bound=0.5) as meetings:
            meetings.share("here", 0)
        told = str(error.value)
    return shared, told


def meet_in_every_way(folder):
    return come_too_late(), fail(0), fail(1), fail(2), gather(), wait_for_a_stopped_one(folder)


@pytest.mark.costly
def test_all_go_on_or_all_learn_why_not(tmp_path):
    told = [finished.result for finished in run_processes(3, meet_in_every_way, (tmp_path,))]
    late, *failures, gathered, stopped = zip(*told, strict=True)
    assert len(set(late)) == 1  # whoever comes later learns at once that the others are gone
    assert "waited 0.5 s for process" in late[0]
    for failing, texts in enumerate(failures):
        for process, text in enumerate(texts):
            assert (f"save failed in process {failing}: TimeoutError" in text) == (process != failing)
    for process, (texts, missed, after) in enumerate(gathered):
        assert texts == [["0ü", "1ü", "2ü"], ["", "", ""], [f"{index}ü" * 300 for index in range(3)]]
        assert after == ["0", "1", "2"]
        assert process == 1 or "waited 0.5 s for process" in missed
    for process in (1, 2):
        assert f"process {process} waited 0.5 s for process 0" in stopped[process]


def test_a_store_that_fails_is_a_missed_meeting(monkeypatch):
    class Lost:
        def blocking_key_value_get(self, key, milliseconds):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(meeting, "_client", Lost)
    told = pytest.raises(MissedMeeting, match=r"process 1 lost process 0 in save: UNAVAILABLE")
    with told, Meetings("save") as meetings:
        meetings.meet()


@pytest.mark.costly
def test_a_text_of_any_length_reaches_all_and_none_waits_forever():
    (shared, told), (same, _) = (each.result for each in run_processes(2, share_texts))
    assert shared == same == ["1ü" * 300_000, "", "0ü"]
    assert "waited 0.5 s for process 1 in alone" in told
