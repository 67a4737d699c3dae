"""Checkpoints in a folder: which of its folders are checkpoints, and the lock of the one that writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint.tree import STATE

CHECKPOINT_FOLDER = "checkpoints"
"""Name of the folder of checkpoints in the folder of a run."""

METADATA_FILE = "_CHECKPOINT_METADATA"
"""Orbax's file in each checkpoint, which holds the metadata of this package, too."""

LOCK_FILE = ".lock"
"""File that is locked by whoever saves checkpoints in a folder."""

_MARKS = (b'"arrays"', b'"checksums"', b'"crc32"')
"""Keys that this package's metadata have. Two of them count: damage may have changed one."""

REMOVED = "orbax-checkpoint-tmp"
"""Part of the names of folders of unfinished saves in Orbax, which removes what is left of them."""

_TRIES = 100
"""Attempts to take a lock whose file was removed meanwhile."""


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order.

    A folder with a number as its name is only one with this package's metadata, also if they are damaged.

    >>> checkpoint_steps(Path("no folder"))
    []
    """
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if _is_step(path.name) and is_checkpoint(path)]
    return sorted(map(int, names))


def holds_checkpoints(folder: Path) -> bool:
    """Return whether a folder is that of a run with checkpoints, the folder of its checkpoints, or one of them."""
    return is_checkpoint(folder) or bool(checkpoint_steps(folder) or checkpoint_steps(folder / CHECKPOINT_FOLDER))


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint of this package, whole or damaged."""
    file = path / METADATA_FILE
    try:
        found = file.stat()
        ours = _is_ours(str(file), found.st_mtime_ns, found.st_size)
    except OSError:
        ours = None
    # Without metadata that can be read, the database of its arrays tells that it is a damaged one.
    return (path / STATE / "manifest.ocdbt").is_file() if ours is None else ours


@lru_cache(maxsize=1024)
def _is_ours(file: str, changed: int, size: int) -> bool | None:
    """Return whether metadata are this package's; None if they are no metadata at all.

    Args:
        file: path of the file.
        changed, size: time of its last change and its size, with which it is known again.
    """
    text = Path(file).read_bytes()
    if sum(mark in text for mark in _MARKS) >= 2:
        return True
    with contextlib.suppress(ValueError):
        return False if isinstance(json.loads(text), dict) else None
    return None


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))


class StepNames:
    """Names of checkpoints for Orbax, which would take every folder with a number as its name for one.

    Args:
        folder: folder of the checkpoints.
        damaged: steps of damaged ones, which do not count; the set may change.
    """

    # Without a reference to the `TrainCheckpointer`: Orbax may keep this one for ever.
    def __init__(self, folder: Path, damaged: Set[int]):
        self._folder, self._damaged = folder, damaged
        self._standard = ocp.path.step.standard_name_format()

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in order."""
        return [step for step in checkpoint_steps(self._folder) if step not in self._damaged]

    def build_name(self, step: int) -> str:
        """Return the name of a step's folder."""
        return self._standard.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yield Orbax's description of each checkpoint."""
        for step in self.steps():
            try:
                found = self._standard.find_step(base_path, step)
            except ValueError:
                if step in self.steps():  # not removed since: its metadata are malformed
                    raise
                continue
            yield found

    def find_step(self, base_path: Any, step: int) -> Any:
        """Return what Orbax has to know of a checkpoint."""
        return self._standard.find_step(base_path, step)


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove a checkpoint, which is gone at once for whoever reads: it gets the name of an unfinished one first."""
    doomed = folder / f"{step}.{REMOVED}-{uuid.uuid4().hex}"
    (folder / str(step)).rename(doomed)
    shutil.rmtree(doomed)


class FolderTakenError(OSError):
    """Another `TrainCheckpointer` saves in the folder; the message says what to do."""


class FolderLock:
    """Lock of a folder's checkpoints, held from `take` to `release`, or until the process ends.

    On a file system without locks nothing is locked.

    Args:
        folder: folder of the checkpoints.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / LOCK_FILE
        self._close: Callable[[], Any] | None = None

    def take(self) -> None:
        """Lock the folder, which is made if it is missing, unless this object has locked it already.

        Raises:
            FolderTakenError: if another one has locked it. This does not wait.
        """
        if self._close is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(file, 200, 0).decode(errors="replace").strip()
                os.close(file)
                raise self._taken(owner) from None
            except OSError:  # a file system without locks
                pass
            if self._is_current(file):
                os.truncate(file, 0)
                os.pwrite(file, _own_name().encode(), 0)
                # Also when this object is forgotten without `release`.
                self._close = weakref.finalize(self, os.close, file)
                return
            os.close(file)  # who held it has removed it meanwhile
        raise self._taken("")

    def release(self) -> None:
        """Unlock the folder, if this object has locked it."""
        close, self._close = self._close, None
        if close is not None:
            with contextlib.suppress(OSError):  # while it is locked, so that it is the own one that is removed
                self._path.unlink(missing_ok=True)
            close()

    def _is_current(self, file: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False

    def _taken(self, owner: str) -> FolderTakenError:
        whose = "this process" if owner == _own_name() else owner or "another process"
        return FolderTakenError(
            errno.EBUSY,
            f"another TrainCheckpointer, of {whose}, saves in this folder: close it or end its process, or give this "
            "one another folder",
            str(self._folder),
        )


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
