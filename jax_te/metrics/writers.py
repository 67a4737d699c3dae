"""Destinations of metrics: JSON Lines, TensorBoard, Weights & Biases, or your own writer."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from jax_te._validation import require_extra
from jax_te.metrics.files import METRICS_FILE, PARTIAL, TENSORBOARD_FOLDER, WANDB_ID_FILE
from jax_te.typing import WriterName

Recorded = int | float | list[float]
"""A number, or a vector, in a record."""

_BEGIN = b'{"step": '
"""First bytes of every record that is written here or in `jax_te.metrics.precision_log`."""
_BLOCK = 2**20
"""Bytes of a file that are copied at once."""


@runtime_checkable
class MetricsWriter(Protocol):
    """Interface of the writers of `MetricsLog`: a class with these three methods.

    >>> class Printer:
    ...     def write(self, step, values):
    ...         print(step, values)
    ...     def flush(self): ...
    ...     def close(self): ...
    >>> isinstance(Printer(), MetricsWriter)
    True
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers by name; a step may occur more than once, with other names."""
        ...

    def flush(self) -> None:
        """Write buffered data to durable storage."""
        ...

    def close(self) -> None:
        """Close the writer."""
        ...


class JsonLinesWriter:
    """A line of ``metrics.jsonl`` for each record; numbers that are not finite are null, vectors are lists."""

    def __init__(self, directory: Path, resume_step: int | None):
        if resume_step is not None:
            cut_after(directory / METRICS_FILE, resume_step)
        self._file = (directory / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Recorded]) -> None:
        finite = {
            name: [*map(_finite, value)] if isinstance(value, list) else _finite(value)
            for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()
        # A checkpoint must never be newer than the records of its step, also if the machine stops here.
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: int | float) -> int | float | None:
    # null, because JSON has no nan: json.dumps would write a line that other readers refuse.
    return value if math.isfinite(value) else None


class _TensorBoardWriter:
    def __init__(self, directory: Path, resume_step: int | None):
        # Later events are in files of the killed run, and before a new one (0) all are in files of others: TensorBoard
        # hides the events of steps >= purge_step in these.
        purge = resume_step + 1 if resume_step else resume_step
        folder = str(directory / TENSORBOARD_FOLDER)
        self._events = require_extra(*_PACKAGES["tensorboard"]).SummaryWriter(folder, purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _WandbWriter:
    """A run of Weights & Biases with the folder's name, which keeps its id, so that a resumed run goes on in it."""

    def __init__(self, directory: Path, resume_step: int | None):
        wandb = require_extra(*_PACKAGES["wandb"])
        path = directory / WANDB_ID_FILE
        if not (resume_step and path.exists()):
            path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self._run = wandb.init(
            dir=str(directory), name=directory.resolve().name, id=path.read_text(encoding="utf-8"), resume="allow"
        )
        # Its own step only grows, and a resumed run repeats the steps after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step} | {name: value for name, value in values.items() if math.isfinite(value)})

    def flush(self) -> None:  # it sends by itself
        pass

    def close(self) -> None:
        self._run.finish()


_WRITERS: dict[str, Any] = {"jsonl": JsonLinesWriter, "tensorboard": _TensorBoardWriter, "wandb": _WandbWriter}
_PACKAGES = {"tensorboard": ("tensorboardX", "train"), "wandb": ("wandb", "wandb")}
"""Package that a writer needs, and the extra that installs it."""


def require_writers(names: Iterable[str]) -> None:
    """Raise ModuleNotFoundError if the package of one of these writers is not installed."""
    for name in names:
        if name in _PACKAGES:
            require_extra(*_PACKAGES[name])


def check_writers(writers: Sequence[WriterName | MetricsWriter]) -> None:
    """Raise for what `open_writer` cannot open.

    Raises:
        ModuleNotFoundError: if a writer's package is not installed.
        ValueError: for another name, and for one that is given twice, which would write each record twice.
        TypeError: for anything else.
    """
    for number, writer in enumerate(writers):
        if any(writer is other or (isinstance(writer, str) and writer == other) for other in writers[:number]):
            raise ValueError(f"the writer {writer!r} is given twice, and would write each record twice; give it once")
        if isinstance(writer, str) and writer not in _WRITERS:
            raise ValueError(
                f"no writer is called {writer!r}; there are {', '.join(_WRITERS)}, and your own MetricsWriter"
            )
        if not isinstance(writer, str) and not isinstance(writer, MetricsWriter):
            raise TypeError(f"a writer is one of {get_args(WriterName)} or has write, flush and close; got {writer!r}")
    require_writers(writer for writer in writers if isinstance(writer, str))


def check_resume_step(resume_step: int | None, path: Path) -> None:
    """Raise for a step behind which records of a file cannot be removed.

    Raises:
        ValueError: for a step that no checkpoint has; without one, for a file that is not empty, which it keeps.
    """
    if resume_step is None:
        if records := read_records(path):
            raise ValueError(
                f"{path} has the records of a run up to step {records[-1]['step']}; give the step of the restored "
                "checkpoint as resume_step, or 0 to remove them and begin anew"
            )
        if has_content(path):
            raise ValueError(
                f"{path} is not empty, and no line of it is a whole record of a run; give another folder, or move the "
                "file away"
            )
    elif not 0 <= resume_step < 2**63:
        raise ValueError(f"resume_step must be an integer >= 0, below 2^63, got {resume_step}")


def open_writer(writer: WriterName | MetricsWriter, directory: Path, resume_step: int | None) -> MetricsWriter:
    """Return the writer of a name, opened in a run's folder; one that is a writer already as it is.

    Args:
        writer: name, or writer.
        directory: the run's folder.
        resume_step: step whose later records are removed; see `cut_after`. None: there are none.
    """
    return _WRITERS[writer](directory, resume_step) if isinstance(writer, str) else writer


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file, without lines that hold none; none for a missing file."""
    try:
        with path.open("rb") as file:
            return [record for record in map(_record, file) if record is not None]
    except FileNotFoundError:
        return []


def has_content(path: Path) -> bool:
    """Return whether there is a file at the path that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def cut_after(path: Path, step: int) -> None:
    """Remove the records of later steps, and one that was left unfinished at the end; all other lines stay.

    Lines that stay may be damaged, or another program's.
    """
    if not path.exists():
        return
    end, cut, behind, line = 0, False, [], b"\n"
    with path.open("rb") as file:  # in bytes: text mode would translate line ends, and offsets would be wrong
        for line in file:
            stays = _stays(line, step)
            cut = cut or not stays
            if not cut:
                end += len(line)
            elif stays:
                behind.append(line)
    if behind:
        _replace_after(path, end, behind)
    elif cut:
        os.truncate(path, end)
    if not line.endswith(b"\n") and _stays(line, step):
        with path.open("ab") as file:  # so that the next record begins a line
            file.write(b"\n")


def _replace_after(path: Path, end: int, lines: Iterable[bytes]) -> None:
    """Replace what follows the first ``end`` bytes of a file, atomically: these lines are in no other place."""
    partial = path.with_name(path.name + PARTIAL)
    with path.open("rb") as file, partial.open("wb") as new:
        for start in range(0, end, _BLOCK):
            new.write(file.read(min(_BLOCK, end - start)))
        new.writelines(lines)
        new.flush()
        os.fsync(new.fileno())
    os.replace(partial, path)


def _stays(line: bytes, step: int) -> bool:
    """Return whether a line is neither a record of a later step nor one of which a killed run wrote only a part."""
    record = _record(line)
    if record is not None:
        return record["step"] <= step
    return line.endswith(b"\n") or not (line.startswith(_BEGIN) or _BEGIN.startswith(line))


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None for one that is damaged or unfinished, which must not cost the others."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole and is_number(record["step"]) else None


def curve(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric, from those records that have it as a number.

    >>> curve([{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}], "loss")
    ([1], [2.5])
    """
    points = [(record["step"], float(record[name])) for record in records if is_number(record.get(name))]
    return [step for step, _ in points], [value for _, value in points]


def is_number(value: Any) -> bool:
    """Return whether a value read from a file is a number that plots can show: JSON's integers have any size.

    >>> is_number(2.5), is_number("2.5"), is_number(10**400)
    (True, False, False)
    """
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
