"""The rows of a measurement of ``jax-te bench``: printed one by one, and written to a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jax_te._device import default_device
from jax_te._whole_files import whole_or_nothing
from jax_te.bench import Row
from jax_te.cli.compile_cache import keep_compiled_programs


def show_rows(rows: Iterable[Row], output: str | None) -> int:
    """Return the exit status, 0, once the rows are printed, each when it is measured.

    Args:
        rows: iterator that measures.
        output: JSON file for all of them, or None.

    Raises:
        ValueError: if there is none, or if none could be measured, with the first one's error.
        OSError: before anything is measured, for a file that cannot be written.
    """
    with contextlib.ExitStack() as stack:
        path = None if output is None else Path(output)
        part = None if path is None else stack.enter_context(whole_or_nothing(path.parent)).part(path.name)
        found = _show(rows)
        if part is not None:
            part.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _show(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the device, JAX's version and the rows, each of which is printed when it is measured."""
    keep_compiled_programs()
    device, shown = default_device().device_kind, []
    print(f"{device}, jax {jax.__version__}", flush=True)
    for row in rows:
        print(json.dumps(row), flush=True)
        shown.append(row)
    if not shown:  # an empty list, which argparse of Python 3.11 makes of `--recipes=--`
        raise ValueError("there is nothing to measure: an option that names what to measure is empty; name something")
    # A contestant that fails becomes a row, so that the others continue; it is an error if none was measured.
    if all("error" in row for row in shown):
        raise ValueError(f"nothing could be measured; {shown[0]['name']}: {shown[0]['error']}")
    return {"device": device, "jax": jax.__version__, "rows": shown}
