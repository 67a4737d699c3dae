"""Reading files within limits: whatever a file holds, it ends in a value or in one error that names the file."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

MAX_BYTES = 2**21
"""The largest file of settings."""

MAX_DEPTH, MAX_VALUES = 50, 100_000
"""Nesting of a file's content, and its values, where an alias counts as all that it stands for."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def brief(value: object) -> str:
    """Return ``repr(value)``, shortened: a message holds no file's whole content, however often aliases repeat it.

    >>> brief(["a"] * 1000)
    "['a', 'a', 'a', 'a', 'a', 'a', ...]"
    """
    return _REPR.repr(value)


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
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from None


def check_nesting(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Raise ValueError if a tree is deeper than `MAX_DEPTH` or has more than `MAX_VALUES` nodes.

    A node that several parents share counts for each of them.

    Args:
        root: the tree.
        children: node -> its children.

    >>> check_nesting([[1], [2]], lambda node: node if isinstance(node, list) else ())
    """
    waiting, seen = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if seen > MAX_VALUES:
            raise ValueError(f"it stands for more than {MAX_VALUES} values")
        waiting += [(child, depth + 1) for child in children(node)]


def parse_json(text: str | bytes, name: str) -> Any:
    """Return the content of a JSON text.

    Args:
        text: JSON.
        name: of the text in error messages.

    Raises:
        ValueError: for text that is no JSON (nan and infinity are none), a key that occurs twice, and nesting as
            `check_nesting`.

    >>> parse_json('{"a": [1, 2]}', "the text")
    {'a': [1, 2]}
    """
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        check_nesting(content, _children)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read as JSON: {error}") from error
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {brief(key)} occurs twice")
        values[key] = value
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
