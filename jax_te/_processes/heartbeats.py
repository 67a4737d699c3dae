"""Heartbeats: small files in which the processes of a run report progress to each other, or why they end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HEARTBEAT_FOLDER = ".processes"
"""Name of the folder, inside of the checkpoints' or the run's folder, for the heartbeats of several processes."""

_SIZE = 4096
"""Bytes of a file: always the same, so that the next heartbeat fits even on a full disk."""
_TEXT = 300
"""Characters of an error or an occupation, of up to 6 bytes each in JSON."""
_BUSY = 0.05
"""Share of one core that a process uses at least while it compiles or reads; one that only waits uses less."""
_LONGEST_INTERVAL = 2.0
_ENDING = 10.0
"""Most seconds for which a process that ends waits for the file system, which may not answer any more."""
_LOCKING, _BETWEEN = 10.0, 0.01
"""Seconds for which a process waits for the lock of its own file, and between two tries."""


class SameNumberError(TimeoutError):
    """Two processes of a run that have the same number."""


class LinkedFolderError(ValueError):
    """A folder of a run that is a symbolic link; the message says what to do."""


def shortened(text: str, length: int = _TEXT) -> str:
    """Return a text cut in the middle to at most so many characters: an error's reason is at its end.

    >>> shortened("Failed writing in a/very/long/path: File too large", 33)
    'Failed writing … File too large'
    """
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half].rstrip()} … {text[-half:].lstrip()}"


class Heartbeat(NamedTuple):
    """Report of a process about itself.

    Args:
        sequence: number of the heartbeat. It grows as long as the process runs.
        progress: number that grows as long as the process makes progress; that of process 0 also when another one does.
        save_progress: number that grows as long as a save under way makes progress, likewise.
        phase: number of the things that it has begun: the same in all processes at the same point of the program.
        activity: the last of these, in words.
        error: reason why the run cannot go on. Empty: it can.
        locked_on: name of the machine on which the process holds the lock on its file. Empty: it holds none.
    """

    sequence: int = 0
    progress: int = 0
    save_progress: int = 0
    phase: int = 0
    activity: str = "its start"
    error: str = ""
    locked_on: str = ""


class _Watched:
    """Another process as seen by this one: its last heartbeat, when its numbers changed, and whether it has ended."""

    def __init__(self, now: float):
        self.heartbeat = Heartbeat()
        self.changed_at = {"sequence": now, "progress": now, "save_progress": now}
        self.locks = False
        self.ended = False

    def take(self, heartbeat: Heartbeat, now: float) -> None:
        for name in self.changed_at:
            if getattr(heartbeat, name) != getattr(self.heartbeat, name):
                self.changed_at[name] = now
        self.heartbeat = heartbeat


class Heartbeats:
    """The heartbeats of one run's processes, from `start` to `stop`, or while entered.

    Each process writes its own file, whose name is unique to this start of the run. Process 0 reads all files, and the
    others read only its file, which contains its findings. A process that ends in an orderly way removes its file,
    unless it contains an error. Where the file system supports locks, the lock on a file reveals that a process was
    killed.

    Args:
        folder: folder that all processes share; made if missing.
        run: a name that is the same in all processes, and no other start has.
        index, count: number of this process, and of all.
        bounds: all timeouts in seconds; heartbeats are written ten times as often as the shortest one needs.
        after_look: function called after every look at the other processes, in a thread of its own. It may end the
            process.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        index: int,
        count: int,
        bounds: tuple[float, ...],
        after_look: Callable[[Heartbeats], None] | None = None,
    ):
        self.interval = min(_LONGEST_INTERVAL, min(bounds) / 10)
        self._ending = min(_ENDING, *bounds)
        self._folder, self._run, self._index = folder, run, index
        self._path = folder / f"{run}.{index}"
        self._after_look, self._measure = after_look, None
        self._own = Heartbeat()
        self._of_own, self._of_files, self._over = threading.Lock(), threading.Lock(), threading.Event()
        self._now, self._written_at = 0.0, 0.0
        self._watched = {other: _Watched(0.0) for other in (range(1, count) if index == 0 else (0,))}
        self._own_changed_at = {"progress": 0.0, "save_progress": 0.0}
        self._waits, self._busy = False, _cpu_seconds()
        self._measured = 0
        self._keeper: int | None = None

    def __enter__(self) -> Heartbeats:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to write heartbeats and to watch those of the others.

        Raises:
            LinkedFolderError: if the folder is a symbolic link.
            SameNumberError: if another process holds the lock of this one's file.
        """
        if self._folder.is_symlink():
            raise LinkedFolderError(
                f"{self._folder} is a symbolic link, and runs write only into their own folder; remove it"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keeper = _open(_lock_of(self._path), os.O_CREAT | os.O_RDWR)
        if _lock(self._keeper, _lock_of(self._path)):
            self._own = self._own._replace(locked_on=_this_machine())
        if self._index == 0:
            self._remove_stale_files()
        self._write()
        for work in (self._write_and_read, self._watch):
            threading.Thread(target=work, name="jax_te-heartbeats", daemon=True).start()

    def stop(self) -> None:
        """End in an orderly way: the others do not wait for this process any more."""
        self._over.set()
        self._while_files_answer(self._remove_own_files)

    def begin(self, activity: str, *, waits: bool = False) -> None:
        """Report that this process begins something; all processes begin the same things in the same order.

        Args:
            activity: a few words, behind which a line says "in".
            waits: whether it is a wait for other processes. Otherwise CPU time counts as progress, such as that of
                compilation.
        """
        with self._of_own:
            self._own = self._own._replace(phase=self._own.phase + 1, activity=activity[:_TEXT])
            self._waits = waits
        self._made_progress("progress")

    def measure(self, of_save: Callable[[], int] | None) -> None:
        """Set a function whose number changes while the save under way makes progress; None: there is no save."""
        self._measure = of_save
        self._made_progress("save_progress", "progress")

    def fail(self, text: str) -> None:
        """Tell the others immediately why this process ends."""
        self._take_error(text)
        self._while_files_answer(self._write)

    def _while_files_answer(self, work: Callable[[], None]) -> None:
        """Call what works on files, and return when it has ended, or after a bound: it may never end."""

        def run() -> None:
            with contextlib.suppress(OSError):  # the others notice by the heartbeats that stay out
                work()

        thread = threading.Thread(target=run, name="jax_te-heartbeats-end", daemon=True)
        thread.start()
        thread.join(self._ending)

    def find_problem(self, bound: float, *, clock: str = "progress") -> str | None:
        """Return a line about the process for which this one has waited too long, None if there is none.

        Args:
            bound: seconds without a heartbeat.
            clock: kind of heartbeat: ``"progress"`` of the whole run, ``"save_progress"`` of a save.
        """
        return self.lost_process(bound) or self.standstill(bound, clock=clock)

    def lost_process(self, bound: float) -> str | None:
        """Return a line about a process that has failed, was killed, or shows no sign of life; None if there is none.

        Args:
            bound: seconds without a heartbeat.
        """
        error = self.reported_error()
        if error is not None:
            return error
        if self._cannot_write(bound):  # a folder out of reach shows no heartbeats of others, either
            return None
        for other, seen in self._watched.items():
            if not seen.ended and self._now - seen.changed_at["sequence"] > bound:
                last = (
                    f"the last was in {seen.heartbeat.activity}"
                    if seen.heartbeat.sequence
                    else "it may be in another folder"
                )
                return f"process {other} has sent no heartbeat for {bound:g} s; {last}"
        return None

    def standstill(self, bound: float, *, clock: str = "progress") -> str | None:
        """Return a line about what keeps all processes from going on, None if there is nothing; see `find_problem`."""
        since = f"for {bound:g} s"
        if self._cannot_write(bound):
            return f"heartbeats cannot be written to {self._folder} {since}"
        newest = max([self._own_changed_at[clock], *(seen.changed_at[clock] for seen in self._watched.values())])
        if self._now - newest > bound:
            if clock == "save_progress":
                return f"no process has written anything {since}"
            where = {self._index: self._own, **{other: seen.heartbeat for other, seen in self._watched.items()}}
            each = ", ".join(
                f"process {other} in {heartbeat.activity}" for other, heartbeat in sorted(where.items())[:8]
            )
            return f"no process has made progress {since}: {each}"
        return None

    def _cannot_write(self, bound: float) -> bool:
        return self._now - self._written_at > bound

    def reported_error(self) -> str | None:
        """Return the error of another process, or that one was killed; None if there is none."""
        for other, seen in self._watched.items():
            if seen.heartbeat.error:
                return seen.heartbeat.error
            if seen.locks and seen.ended:
                return f"process {other} was ended from outside, in {seen.heartbeat.activity}"
        return None

    def processes_behind(self) -> list[tuple[int, str]]:
        """Return index and activity of the processes for which this one waits, because they are behind it."""
        if not self._waits:
            return []
        heartbeats = [(other, seen.heartbeat) for other, seen in self._watched.items() if not seen.ended]
        return [(other, heartbeat.activity) for other, heartbeat in heartbeats if heartbeat.phase < self._own.phase]

    def seconds_waited(self) -> float:
        """Return the number of seconds for which this process has been at its present point."""
        return self._now - self._own_changed_at["progress"]

    def _made_progress(self, *clocks: str) -> None:
        for clock in clocks:
            self._count(clock)
            self._own_changed_at[clock] = self._now

    def _count(self, number: str) -> None:
        with self._of_own:  # the loop's thread begins things, the heartbeats' thread counts
            self._own = self._own._replace(**{number: getattr(self._own, number) + 1})

    def _take_error(self, text: str) -> None:
        """Keep only the first error: others follow from it."""
        with self._of_own:
            self._own = self._own._replace(error=self._own.error or shortened(text))

    def _watch(self) -> None:
        """Measure time and draw conclusions without reading files, since these may hang."""
        before = time.monotonic()
        while not self._over.wait(self.interval):
            now = time.monotonic()
            # Not more time than this thread has observed: a process that was stopped itself must not consider others
            # late.
            self._now += min(now - before, 2 * self.interval)
            before = now
            if self._after_look is not None:
                self._after_look(self)

    def _write_and_read(self) -> None:
        while not self._over.wait(self.interval):
            self._measure_progress()
            for other in self._watched:
                self._read_other(other)
            # Full disks and unreachable folders become visible in the time since the last heartbeat.
            with contextlib.suppress(OSError):
                self._write()

    def _measure_progress(self) -> None:
        busy = _cpu_seconds()
        if not self._waits and busy - self._busy > _BUSY * self.interval:
            self._made_progress("progress")
        self._busy = busy
        measure, measured = self._measure, self._measured
        with contextlib.suppress(OSError):  # a folder out of reach shows no progress, and heartbeats go on
            measured = 0 if measure is None else measure()
        if measured != self._measured:
            self._measured = measured
            self._made_progress("save_progress", "progress")

    def _read_other(self, other: int) -> None:
        seen, path = self._watched[other], self._folder / f"{self._run}.{other}"
        try:
            heartbeat = Heartbeat(*json.loads(_read(path)))
        except FileNotFoundError:
            seen.ended, seen.locks = seen.heartbeat.sequence > 0, False  # in an orderly way, if it had begun
            return
        except (OSError, ValueError, TypeError):
            return  # an incomplete heartbeat; the next read returns the whole
        for clock in ("progress", "save_progress"):
            if self._index == 0 and getattr(heartbeat, clock) != getattr(seen.heartbeat, clock):
                self._count(clock)  # it shows the others that one of them makes progress
        seen.take(heartbeat, self._now)
        held = _is_locked(_lock_of(path))
        # A lock taken on this machine is seen here: if it is free, the process that held it is gone. Some file systems
        # do not show the locks of other machines: one of those must have been seen held before.
        seen.locks = seen.locks or heartbeat.locked_on == _this_machine()
        # An orderly end removes the file first.
        seen.ended = seen.locks and held is False and path.exists()
        seen.locks = seen.locks or held is True
        if self._index == 0:
            self._take_error(self.reported_error() or "")

    def _write(self) -> None:
        with self._of_files:
            if self._over.is_set():
                return
            self._count("sequence")
            text = json.dumps(self._own).encode()
            file = _open(self._path, os.O_CREAT | os.O_WRONLY)
            try:
                os.pwrite(file, text.ljust(_SIZE), 0)
            finally:
                os.close(file)  # only then other hosts see it on NFS
            self._written_at = self._now

    def _remove_own_files(self) -> None:
        with self._of_files:
            if not self._own.error:  # which the others have yet to read
                for path in (self._path, _lock_of(self._path)):
                    path.unlink(missing_ok=True)
            if self._keeper is not None:
                os.close(self._keeper)
            with contextlib.suppress(OSError):  # other processes' are there
                self._folder.rmdir()

    def _remove_stale_files(self) -> None:
        """Remove the files of processes that were killed."""
        for path in self._folder.iterdir():
            heartbeat = path.with_suffix("") if path.suffix == ".lock" else path
            if not path.name.startswith(f"{self._run}.") and not _is_locked(_lock_of(heartbeat)):
                path.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(file: int, path: Path) -> bool:
    """Lock a process's own file, and return whether the file system has locks."""
    deadline = time.monotonic() + _LOCKING
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process looks at it, which takes an instant
            if time.monotonic() > deadline:
                text = f"another process of the run holds it for {_LOCKING:g} s: two have the same number"
                raise SameNumberError(errno.ETIMEDOUT, text, str(path)) from None
            time.sleep(_BETWEEN)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def _open(path: Path, how: int) -> int:
    return os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _read(path: Path) -> bytes:
    file = _open(path, os.O_RDONLY)
    try:
        return os.read(file, _SIZE)
    finally:
        os.close(file)


def _is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None if there is no file, or it is unknown."""
    try:
        file = _open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


@lru_cache
def _this_machine() -> str:
    """Return a name of the running system, which processes in containers of one machine share."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
