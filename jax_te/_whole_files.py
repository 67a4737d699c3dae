"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

PART = ".part"
"""Suffix of a file or folder that is not complete."""

_TRIES = 10
"""Number of times to make a folder that another writer removes again and again."""


class NewFiles:
    """Files and folders of one folder that have other names until all of them are complete.

    Several processes may write into the same folder, each its own files: no method touches what another one made.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: list[Path] = []
        self._parts: dict[str, Path] = {}

    def part(self, name: str) -> Path:
        """Return the path of an empty file, to be written, that gets its name when all are complete."""
        part = self._begin(name)
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):  # the writer that had made the folder has just removed it
                part.touch(exist_ok=False)
                return part
            self._make_folder()
        part.touch(exist_ok=False)
        return part

    def part_folder(self, name: str) -> Path:
        """Return the path of a folder, made by what is written into it, that gets its name when all are complete."""
        return self._begin(name)

    def _begin(self, name: str) -> Path:
        """Return the path of a part, of which nothing is there."""
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

    def publish(self) -> None:
        """Give all parts their names, in the order in which they were begun."""
        for name, part in self._parts.items():
            part.replace(self.folder / name)

    def discard(self) -> None:
        """Remove all parts, and the folders that this object made, unless others have put something there."""
        with contextlib.suppress(OSError):  # the error that led here says more
            for part in self._parts.values():
                _remove(part)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[NewFiles]:
    """Return a context for files of a folder that appear together, at its end, or, if it raises, not at all.

    A context that raises leaves what was there before: it removes its parts, and the folders made for them.

    Args:
        folder: folder of the files; made, with its parents, for the first of them.

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
        new.publish()
    except BaseException:
        new.discard()
        raise


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
