"""Reading of a checkpoint: in each process separately, with agreement of all processes on the result."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jax_te._processes import attempt
from jax_te.checkpoint import stored_arrays
from jax_te.checkpoint.folder import Folder
from jax_te.checkpoint.steps import METADATA_FILE
from jax_te.checkpoint.tree import Name, crc32, stored_parts


class DamagedError(Exception):
    """A checkpoint that cannot be read."""


_NOT_DAMAGE = (MemoryError, PermissionError, Warning, jax.errors.JaxRuntimeError)
"""Errors of a read that are not caused by the checkpoint."""


def _reading(read: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``read``. A failed read raises `DamagedError`, unless the checkpoint is not the cause."""
    try:
        return read(*args)
    except Exception as error:
        reason = _damage(error)
    raise DamagedError(f"it cannot be read ({reason})")


def _damage(error: Exception) -> str:
    """Return an error's description of the damage, or raise its cause if the checkpoint is not damaged."""
    links = chain(error)
    for link in links:
        if not isinstance(link, Exception) or isinstance(link, _NOT_DAMAGE):
            raise link from None
    return str(links[-1])[:160]


def in_all_processes(read: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``read``, or raise in all processes if it raises in one: they would wait for each other."""
    result, error, failures = attempt(lambda: read(*args), expected=DamagedError)
    if error is not None and not isinstance(error, DamagedError):
        raise error
    failed = [failure for failure in failures if failure is not None]
    for failure in failed:
        if not failure.is_expected:
            raise RuntimeError(failure.text)
    if failed:
        raise error or DamagedError(failed[0].text)
    return result


@contextlib.contextmanager
def quiet_orbax() -> Iterator[list[BaseException]]:
    """Yield the errors that Orbax logs, and drop them and its warnings from the log: callers raise them."""
    # A new object for each use, so that leaving one of several open uses does not take the filter from the others.
    logger, log_filter = logging.getLogger("absl"), _NotFromOrbax()
    logger.addFilter(log_filter)
    try:
        yield log_filter.errors
    finally:
        logger.removeFilter(log_filter)


class _NotFromOrbax(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def filter(self, record: logging.LogRecord) -> bool:
        dropped = "orbax" in record.pathname and logging.WARNING <= record.levelno < logging.CRITICAL
        if dropped and record.levelno >= logging.ERROR and record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])
        return not dropped


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, down to the first."""
    links = [error]
    while links[-1].__cause__ is not None:
        links.append(links[-1].__cause__)
    return links


def read_metadata(path: Path) -> dict[str, Any]:
    """Return ``format``, ``data``, ``arrays`` and ``checksums`` of a checkpoint, verified by their own checksum.

    Raises:
        DamagedError: if they are missing or corrupted.
    """
    stored: dict[str, Any] = _reading(_custom_metadata, path)
    if stored.pop("crc32", None) != crc32(stored):
        raise DamagedError("its metadata cannot be read")
    if str(stored.get("step", path.name)) != path.name:  # metadata without a step have another format, too
        raise DamagedError(f"it is that of step {stored['step']}, in a folder of another name; rename it back")
    return stored


def _custom_metadata(path: Path) -> dict[str, Any]:
    # Orbax's own file. Orbax's function also reads the metadata of each array, one by one.
    return dict(json.loads((path / METADATA_FILE).read_bytes())["custom_metadata"] or {})


def read_back(path: Path) -> None:
    """Read everything in a checkpoint except the arrays' values, through Orbax.

    Raises:
        DamagedError: if something is missing.
    """
    read_metadata(path)
    _reading(_array_metadata, path)


def _array_metadata(path: Path) -> None:
    with quiet_orbax():
        found: Any = ocp.checkpointables_metadata(Folder(path))
    if None in found.metadata.values():  # a failed read, although Orbax raises nothing
        raise DamagedError("its arrays are not there")


def describe_checkpoint(path: Path) -> tuple[int, dict[str, tuple[str, tuple[int, ...], str]]]:
    """Return the step of one checkpoint of a `TrainCheckpointer`, and each array's dtype, shape and saved sharding.

    No array is read.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        arrays = read_metadata(path.absolute())["arrays"]  # Orbax finds nothing under a relative path
        shardings: dict[str, str] = {}
        # Orbax's own file: names in base64, and JSON in strings of JSON.
        for file in sorted(path.glob("*/_sharding")):
            for name, text in json.loads(file.read_text()).items():
                saved = json.loads(text)
                spec = [axis for axis in saved.get("partition_spec", ()) if axis]
                shardings[base64.b64decode(name).decode()] = f"{saved['partition_spec']}" if spec else "replicated"
        return int(path.name), {
            name: (dtype, tuple(shape), shardings.get(".".join(stored_parts(tuple(name.split("/")))), "one device"))
            for name, (dtype, shape) in arrays.items()
        }
    except (DamagedError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint that can be read ({error})") from None


def read_arrays(path: Path, wanted: dict[Name, jax.ShapeDtypeStruct]) -> dict[Name, Any]:
    """Return arrays of a checkpoint, in the shardings of ``wanted``; others are not read.

    Raises:
        DamagedError: if one cannot be read.
    """
    return _reading(stored_arrays.read_arrays, path, wanted)
