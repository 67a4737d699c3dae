"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

PART = ".part"
"""Suffix of a file or folder that is not complete."""

_TRIES = 10
"""Number of times to make a folder that another writer removes again and again."""
_NAMED = 8
"""Number of files that a message names."""


class NewFiles:
    """Files and folders of one folder that have other names until all of them are complete.

    Several processes may write into the same folder, each its own files: no method touches what another one made.

    `discard` undoes everything until `publish` begins, which is the point of no return: it removes older files, and
    what is complete is then never discarded.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: list[Path] = []
        self._older: list[Path] = []
        self._parts: dict[str, Path] = {}

    def part(self, name: str) -> Path:
        """Return the path of an empty file, to be written, that gets its name when all are complete."""
        part = self._begin(name, is_folder=False)
        for further in reversed(range(_TRIES)):
            try:
                part.touch(exist_ok=False)
                break
            except FileNotFoundError:  # the writer that had made the folder has just removed it
                if not further:
                    raise
                self._make_folder()
        return part

    def part_folder(self, name: str) -> Path:
        """Return the path of a folder, made by what is written into it, that gets its name when all are complete."""
        return self._begin(name, is_folder=True)

    def replaces(self, paths: Iterable[Path]) -> None:
        """Have older files, those that are there, removed in this order just before the new ones get their names."""
        self._older += paths

    def _begin(self, name: str, *, is_folder: bool) -> Path:
        """Return the path of a part, of which nothing is there."""
        self._check_target(name, is_folder=is_folder)  # now, since what is written may take hours
        self._make_folder()
        part = self.folder / (name + PART)
        _remove(part)  # of a call that was killed
        self._parts[name] = part
        return part

    def _make_folder(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process has made it meanwhile, and may need it
                path.mkdir()
                self._made.append(path)
        self.folder.mkdir(parents=True, exist_ok=True)  # raises for a file

    def _check_target(self, name: str, *, is_folder: bool) -> None:
        """Raise OSError if a part cannot get its name: a file that of a folder, a folder that of what is not empty."""
        target = self.folder / name
        if _is_folder(target) and not is_folder:
            raise IsADirectoryError(errno.EISDIR, "a folder has the name of a file to write; remove it", str(target))
        if is_folder and target.exists() and not (_is_folder(target) and not any(target.iterdir())):
            raise FileExistsError(errno.EEXIST, "it has the name of a folder to write; remove it", str(target))

    def check(self) -> None:
        """Raise OSError if it can be seen that `publish` would fail."""
        for name, part in self._parts.items():
            part.lstat()  # raises if it is gone
            self._check_target(name, is_folder=_is_folder(part))
        for path in self._older:
            if _is_folder(path):
                raise IsADirectoryError(errno.EISDIR, "a folder has the name of a file; remove it", str(path))

    def publish(self) -> None:
        """Remove the older files, and give all parts their names in the order in which they were begun.

        A call that fails, or is interrupted, leaves some of the older files, some of the new ones, and the other parts,
        which are complete. The error says which are to be removed and renamed.

        Raises:
            OSError: if a file cannot be removed or renamed.
        """
        try:
            if any(path.exists() for path in (*self._older, *(self.folder / name for name in self._parts))):
                # What replaces it is on the disk before it is gone: a machine may stop at any time.
                for part in self._parts.values():
                    _flush(part)
            for path in self._older:
                path.unlink(missing_ok=True)
            for name, part in self._parts.items():
                part.replace(self.folder / name)
        except OSError as error:
            text = f"{error.strerror or error}; {self._way_on()}"
            raise OSError(error.errno or errno.EIO, text, error.filename) from error
        except BaseException as error:
            error.add_note(self._way_on())
            raise

    def _way_on(self) -> str:
        """Return instructions to complete the exchange of files by hand."""
        older = [path.name for path in self._older if path.name not in self._parts and path.exists()]
        parts = [part.name for part in self._parts.values() if part.exists()]
        if not older and not parts:
            return f"the new files of {self.folder} are all there"
        steps = [f"remove {_listed(older)}"] if older else []
        steps += [f"rename {_listed(parts)} to the names without {PART}, in this order"] if parts else []
        return f"{self.folder} is left between its older and its new files, which are complete: {', then '.join(steps)}"

    def discard(self) -> None:
        """Remove all parts, and the folders that this object made, unless others have put something there."""
        for part in self._parts.values():
            with contextlib.suppress(OSError):  # the error that led here says more
                _remove(part)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[NewFiles]:
    """Return a context for files of a folder that appear together, at its end, or, if its block raises, not at all.

    A block that raises leaves what was there before: the context removes its parts, and the folders made for them. So
    it does if a name is taken by a folder. After the block, older files are removed and the parts get their names. If
    that exchange fails or is interrupted, the folder is left between both: the parts that have not got their names
    stay, complete, and the error names them. No part is discarded once an older file may be gone.

    Args:
        folder: folder of the files; made, with its parents, for the first of them.

    Raises:
        OSError: if a name is taken by a folder, or the exchange fails.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> with contextlib.suppress(ValueError), whole_or_nothing(root / "new" / "out") as new:
    ...     _ = new.part("model.bin").write_bytes(b"begin")
    ...     raise ValueError
    >>> list(root.iterdir())
    []
    """
    new = NewFiles(folder)
    try:
        yield new
        new.check()
    except BaseException:
        new.discard()
        raise
    new.publish()  # nothing is discarded from here on


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _flush(part: Path) -> None:
    """Return once a file, or all files of a folder, are on the disk."""
    files = [path for path in part.rglob("*") if path.is_file()] if _is_folder(part) else [part]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
