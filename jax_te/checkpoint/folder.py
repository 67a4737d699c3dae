"""Names of folders that Orbax and etils use unchanged."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from etils.epath.gpath import PosixGPath

INSIDE = 200
"""Maximum length in bytes of a file's path inside of a checkpoint."""

CLOUDS = ("/gs/", "/s3/", "/az/", "/hf/")
"""Root folders that etils interprets as cloud services."""


class Folder(PosixGPath):
    """A path whose own name is not a pattern: with etils' ``glob``, Orbax finds nothing in a folder ``run[1]``."""

    def glob(self, pattern: str) -> Iterator[Folder]:
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def checked_folder(given: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder.

    Raises:
        ValueError: if it is a file, or if Orbax would change its name.
    """
    # Absolute, because the process may change its working directory during a run.
    path, refused = Path(given).absolute(), None
    try:
        os.lstat(path / ("x" * INSIDE))
    except OSError as error:
        refused = {errno.ENOTDIR: "is a file", errno.ENAMETOOLONG: "is too long a name"}.get(error.errno or 0)
    if any(character == "\\" or "\ud800" <= character <= "\udfff" for character in str(path)):
        refused = "has a backslash, or a character that is not Unicode, in its absolute path"
    elif f"{path}/".startswith(CLOUDS) or any(part.endswith(":") for part in path.parts):
        refused = "looks like the address of a service, not a folder"
    elif not os.fspath(given):  # pathlib reads it as the working directory, which is never intended
        refused = "names none"
    elif not refused and path.is_symlink() and not path.exists():
        refused = f"is a symbolic link to {os.readlink(path)}, which does not exist"
    if refused:
        raise ValueError(f"checkpoints need a folder, and {given or repr(given)} {refused}; give another one")
    return path
