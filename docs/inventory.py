"""Inventories of other projects' pages, from the lists in ``docs/inventories``, for docs/conf.py.

The lists are written by hand, for the names that this site uses: the other sites need not be reached to build it. The
first line of a list is the address of the site; each other line has a name, its kind and its place there.
"""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path


def write_inventories(lists: Path, out: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each list, in Sphinx's format, and return ``intersphinx_mapping``."""
    out.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted(lists.glob("*.txt")):
        first, *lines = path.read_text().splitlines()
        entries = [
            f"{alias} py:{kind} 1 {place} {name}"
            for name, kind, place in map(str.split, lines)
            for alias in sorted(aliases_of(name))
        ]
        head = f"# Sphinx inventory version 2\n# Project: {path.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        inventory = out / f"{path.stem}.inv"
        inventory.write_bytes(head.encode() + zlib.compress("\n".join([*entries, ""]).encode()))
        mapping[path.stem] = (first.removeprefix("# "), str(inventory))
    return mapping


def aliases_of(name: str) -> set[str]:
    """Return what annotations and docstrings call an object: its public name, where it is defined, its short names."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)  # fails for a name that the other project no longer has
    defined = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else name
    short = ".".join(name.split(".")[-2:])  # nnx.Module, optax.GradientTransformation
    short_too = {last} if last not in ("Module", "State", "Param", "jit", "grad", "checkpoint", "Variable") else set()
    return {name, defined, short} | short_too
