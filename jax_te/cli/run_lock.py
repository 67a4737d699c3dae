"""The lock of a run's folder, which only one ``jax-te train`` uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jax_te._processes import is_first
from jax_te.cli.run_files import LOCK_FILE, refuse_links


@contextlib.contextmanager
def locked(output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Create the folder, and lock it against other runs until this process ends.

    Raises:
        ValueError: if another run has locked it, and for a link in it.
    """
    output.mkdir(parents=True, exist_ok=True)
    refuse_links(output)
    if not is_first():  # one process locks for all of them
        yield
        return
    with open(output / LOCK_FILE, "a", opener=_no_link) as file:
        try:
            # The kernel drops the lock with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another jax-te train is running in {output}; end it, or give another --output") from None
        except OSError:
            say("this file system has no locks: make sure that no other jax-te train runs in the same folder")
        yield


def is_locked(output: Path) -> bool:
    """Return whether a run has locked the folder, in which nothing is made."""
    try:
        with open(output / LOCK_FILE, opener=_no_link) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
