"""Reading files within limits: whatever a file holds, it ends in a value or in one error that names the file."""

from __future__ import annotations

import os
import reprlib

MAX_BYTES = 2**21
"""The largest file of settings."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def brief(value: object) -> str:
    """Return ``repr(value)``, shortened: a message holds no file's whole content, however often aliases repeat it.

    Of an object whose text has several lines, such as a module, it is the type's name.

    >>> brief(["a"] * 1000)
    "['a', 'a', 'a', 'a', 'a', 'a', ...]"
    """
    text = _REPR.repr(value)
    return type(value).__name__ if "\n" in text else text


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of settings.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is larger than `MAX_BYTES`, or no UTF-8.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES} bytes, so it holds no settings; give another file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from None
