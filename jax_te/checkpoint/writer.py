"""The life of a run's writer: it is opened and locked, waits for one save at a time, and explains its errors."""

from __future__ import annotations

import contextlib
import errno
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import v1 as ocp

from jax_te._processes import (
    HEARTBEAT_FOLDER,
    Heartbeats,
    LinkedFolderError,
    SameNumberError,
    check_same,
    gather_texts,
    in_thread,
    is_first,
    shortened,
)
from jax_te.checkpoint.read import DamagedError, chain, quiet_orbax, read_back
from jax_te.checkpoint.run_steps import RunSteps
from jax_te.checkpoint.steps import FolderLock, FolderTakenError
from jax_te.checkpoint.write import Keep, new_writer, remove_others, size_of_save

_SOON = 0.002
"""Seconds between checks whether Orbax has begun to write, for which a step waits."""


class Save(NamedTuple):
    """A save under way.

    Args:
        step: number of the step.
        written: future of the write.
        logged: errors that Orbax has logged in this process; it raises them only after a wait for the other processes.
    """

    step: int
    written: Future[Any]
    logged: list[BaseException]


class _LostProcessError(TimeoutError):
    """Another process of the run has failed, has ended, or shows no sign of life."""


class Writer:
    """Writer of a run's checkpoints, from the first save to `close`: one save at a time, by all of its processes.

    Args:
        directory: folder of the checkpoints.
        steps: checkpoints that count.
        keep: rules for those to keep.
        timeout: seconds without progress after which a save of several processes has failed.

    Attributes:
        pending: the save under way. None: there is none.
        heartbeats: heartbeats of the run's processes. None: one process, or no save so far.
    """

    def __init__(self, directory: Path, steps: RunSteps, keep: Keep, timeout: float):
        self.pending: Save | None = None
        self.heartbeats: Heartbeats | None = None
        self._directory, self._steps, self._keep, self._timeout = directory, steps, keep, timeout
        self._lock = FolderLock(directory)
        self._orbax: ocp.training.Checkpointer | None = None
        self._own_heartbeats: Heartbeats | None = None
        self._read_back = False

    def open(self, step: int, logged: list[BaseException]) -> ocp.training.Checkpointer:
        """Return Orbax's writer for a step, which all processes open together.

        Args:
            step: number of the step.
            logged: errors of Orbax in this process, see `Save`.
        """
        if jax.process_count() == 1:
            return self._open(step)
        if self.heartbeats is None:
            folder, run = self._directory / HEARTBEAT_FOLDER, gather_texts(uuid.uuid4().hex)[0]
            heartbeats = Heartbeats(folder, run, jax.process_index(), jax.process_count(), (self._timeout,))
            heartbeats.start()
            self.heartbeats = self._own_heartbeats = heartbeats
        self.heartbeats.measure(partial(size_of_save, self._directory, step))
        opened = in_thread(self._open, step)
        self.wait_for(Save(step, opened, logged))
        return opened.result()

    def check_same(self, step: int, values: Mapping[str, object]) -> None:
        """Raise ValueError if a value of a save is not the same in all processes, which wait no longer than for a save.

        Args:
            step: number of the step.
            values: values by what a message calls them.
        """
        if jax.process_count() == 1:
            return
        checked = in_thread(check_same, values)
        with self.explained(step):
            self.wait_for(Save(step, checked, []))
        checked.result()  # not explained: the writer has not failed

    def wait(self) -> None:
        """Wait for the save under way, if any.

        Raises:
            OSError: if it could not be written.
        """
        save = self.pending
        if save is not None:
            with self.explained(save.step):
                self.wait_for(save)  # a wait that is interrupted leaves the save pending
                self.pending = None
                save.written.result()

    def check(self) -> None:
        """Raise the error of a save under way if it has failed by now, without waiting.

        Raises:
            OSError: if it could not be written.
        """
        save = self.pending
        if save is None:
            return
        if save.written.done():
            self.wait()
        elif jax.process_count() > 1:
            with self.explained(save.step):
                self._raise_if_lost(save)

    def wait_for(self, save: Save, begun: threading.Event | None = None) -> None:
        """Wait until a save has ended or begun.

        Raises:
            Exception: with several processes, if this one cannot write its part.
            TimeoutError: if another one cannot, is gone, or none makes progress.
        """
        if self.heartbeats is None:
            wait_for([save.written])
            return
        while not save.written.done() and not (begun is not None and begun.wait(_SOON)):
            if begun is None:
                wait_for([save.written], timeout=self.heartbeats.interval)
            self._raise_if_lost(save)

    def end_save(self, step: int) -> None:
        """Read back what the first save has written, and remove checkpoints that are not kept."""
        if not self._read_back:
            # This detects early a folder in which Orbax does not read what it wrote.
            self._steps.mark_damaged(step)
            read_back(self._directory / str(step))
            self._steps.unmark_damaged(step)
            self._read_back = True
        orbax = self._orbax
        if is_first() and orbax is not None:
            remove_others(orbax, self._directory, self._keep)
        if self.heartbeats is not None:
            self.heartbeats.measure(None)

    def abandon(self) -> None:
        """Stop waiting: Orbax and its threads would wait for the other processes."""
        self.pending, self._orbax = None, None
        self._end_heartbeats()

    def close(self) -> None:
        """Wait for the save under way and free what Orbax holds.

        Raises:
            OSError: if the save could not be written.
        """
        try:
            self.wait()
        except BaseException:
            if jax.process_count() > 1:
                self.abandon()
            raise
        finally:
            with contextlib.ExitStack() as ends:  # each, whatever another one raises
                ends.callback(self._lock.release)
                ends.callback(self._end_heartbeats)
                ends.callback(self._drop)

    @contextlib.contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Turn the errors that Orbax and TensorStore raise for a failed write into one OSError.

        Raises:
            OSError: if the checkpoint cannot be written.
            LinkedFolderError: if the folder of heartbeats is a symbolic link.
        """
        try:
            yield
        except (OSError, RuntimeError, ValueError, DamagedError) as error:
            if self.heartbeats is None:
                # A writer that failed may fail again when it is closed.
                with contextlib.suppress(Exception):
                    self._drop()
            if isinstance(error, FolderTakenError | LinkedFolderError):  # which say what to do themselves
                self._fail(str(error))
                raise
            full, text = self._explain(step, error)
            self._fail(text)
            raise OSError(errno.ENOSPC if full else errno.EIO, text, str(self._directory)) from error

    def _explain(self, step: int, error: Exception) -> tuple[bool, str]:
        """Return whether the disk is full, and the message of a failed save."""
        links = chain(error)
        full = any(_is_of(link, "No space left", errno.ENOSPC, errno.EDQUOT) for link in links)
        last = max(self._steps.steps(), default=None)
        good = "there is no earlier checkpoint" if last is None else f"checkpoint step {last} is still good"
        cause = "no space left on the disk" if full else shortened(str(links[-1]))
        if isinstance(error, _LostProcessError):
            advice = "End this process and start all again"
        elif isinstance(error, SameNumberError):
            advice = "End all processes of the run, and start each with a number of its own"
        elif any(_is_of(link, "File exists", errno.EEXIST) for link in links):
            advice = "Another program seems to save in this folder: end it, or save elsewhere"
        else:
            advice = "Free some space, or save elsewhere"
        return full, f"checkpoint step {step} could not be saved: {cause}; {good}. {advice}"

    def _fail(self, text: str) -> None:
        """Tell the other processes, if there are any, why this one ends, and stop waiting for them."""
        if self.heartbeats is not None:
            self.heartbeats.fail(f"process {jax.process_index()}: {text}")
            self.abandon()

    def _raise_if_lost(self, save: Save) -> None:
        if save.written.done() or self.heartbeats is None:
            return
        if save.logged:
            raise save.logged[0]
        lost = self.heartbeats.lost_process(self._timeout)
        if lost is not None:
            raise _LostProcessError(lost)
        line = self.heartbeats.standstill(self._timeout, clock="save_progress")
        if line is not None:
            raise TimeoutError(line)

    def _open(self, step: int) -> ocp.training.Checkpointer:
        """Return Orbax's writer, after other checkpoints were moved out of the way of a step."""
        if is_first():  # one process locks for all of them
            self._lock.take()
        if self._steps.is_in_the_way(step):
            self._drop()
            self._steps.rename_damaged()
            self._steps.set_later_aside(step)
        if self._orbax is None:
            try:
                self._orbax = new_writer(self._directory, self._steps.names)
            except ValueError:
                # Orbax refuses a folder in which one checkpoint's metadata is malformed, so such ones are moved away.
                for other in self._steps.steps():
                    try:
                        read_back(self._directory / str(other))
                    except DamagedError as error:
                        self._steps.report_damaged(other, str(error))
                self._steps.rename_damaged()
                self._orbax = new_writer(self._directory, self._steps.names)
        return self._orbax

    def _drop(self) -> None:
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            with quiet_orbax():
                orbax.close()

    def _end_heartbeats(self) -> None:
        heartbeats, self._own_heartbeats = self._own_heartbeats, None
        if heartbeats is not None:
            self.heartbeats = None
            heartbeats.stop()


def _is_of(error: BaseException, text: str, *numbers: int) -> bool:
    """Return whether an error is one of the operating system's.

    Args:
        error: error. TensorStore's are no OSErrors, and have the system's text alone.
        text: that text.
        numbers: the system's numbers.
    """
    number = getattr(error, "errno", None)
    return text in str(error) if number is None else number in numbers
