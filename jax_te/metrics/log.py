"""A run's metrics: ``metrics.jsonl``, TensorBoard events and the loss plot."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"
EXTRA_HINT = 'pip install "jax-te[train]"'


def require_extra(name: str) -> ModuleType:
    """Return a module of a package in the ``train`` extra, imported now.

    Args:
        name: dotted name of the module.

    Raises:
        ModuleNotFoundError: if the package is missing; the message names the command that installs it.

    >>> require_extra("json").__name__
    'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this package itself lacks is another fault, which installing the extra would not mend.
        if error.name != name.split(".")[0]:
            raise
        raise ModuleNotFoundError(f"training needs the package {name}; install it with: {EXTRA_HINT}") from None


class MetricsLog:
    """Appends records to ``metrics.jsonl`` and scalars to TensorBoard.

    A record is one line, ``{"step": n, name: number, …}``. Resuming at a step truncates the file after that step's
    records, so that a run that was killed and resumed leaves the same file as an unbroken run, measured speeds apart.
    Numbers that are not finite are written as null.

    Args:
        directory: the run's folder; made if missing.
        resume_step: the step of the restored checkpoint, 0 for a new run.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with MetricsLog(folder) as log:
    ...     log.write(1, {"loss": 2.5})
    >>> read_metrics(folder)
    [{'step': 1, 'loss': 2.5}]
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int = 0):
        tensorboard = require_extra("tensorboardX")
        self._path = Path(directory) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut_after(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")
        # Events after the restored step are in files of the killed run: purge_step makes TensorBoard ignore them.
        folder = str(self._path.parent / TENSORBOARD_FOLDER)
        self._events = tensorboard.SummaryWriter(folder, purge_step=resume_step + 1 if resume_step else None)

    def write(self, step: int, values: Mapping[str, float], *, chart: bool = True) -> None:
        """Append one record.

        Args:
            step: the step's number.
            values: numbers by name.
            chart: also write the finite ones to TensorBoard.
        """
        # null, because JSON has no nan: json.dumps would write a line that other readers refuse.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if chart:
            self.chart(step, values)

    def chart(self, step: int, values: Mapping[str, float]) -> None:
        """Write finite values to TensorBoard only."""
        for name, value in values.items():
            if math.isfinite(value):
                self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Write all buffered data to the disk, e.g. before a checkpoint of the same step."""
        self._file.flush()
        # A checkpoint must never be newer than the records of its step, also if the machine stops here.
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a run in order, without an unfinished last line (of a run that was killed)."""
    return read_records(Path(directory) / METRICS_FILE)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file, without lines that hold none; none for a missing file."""
    try:
        with path.open("rb") as file:
            return [record for record in map(_record, file) if record is not None]
    except FileNotFoundError:
        return []


def cut_after(path: Path, step: int) -> None:
    """Truncate a file of records after the last one before those of later steps; damaged lines in between stay."""
    if not path.exists():
        return
    end = at = 0
    with path.open("r+b") as file:  # in bytes: text mode would translate line ends, and offsets would be wrong
        for line in file:
            record, at = _record(line), at + len(line)
            if record is not None and record["step"] > step:
                break
            end = end if record is None else at
        file.truncate(end)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None for one that is damaged or unfinished, which must not cost the others."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole and is_number(record["step"]) else None


def is_number(value: Any) -> bool:
    """Return whether a value read from a file is a number that plots can show: JSON's integers have any size.

    >>> is_number(2.5), is_number("2.5"), is_number(10**400)
    (True, False, False)
    """
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def plot_losses(directory: str | os.PathLike[str], *, bigram_entropy: float | None = None) -> Path | None:
    """Draw ``loss.png`` from the run's records.

    Args:
        directory: the run's folder.
        bigram_entropy: drawn as a horizontal line for reference.

    Returns:
        The file's path; None if there is nothing to draw.
    """
    records = read_metrics(directory)
    train, heldout = _curve(records, "loss"), _curve(records, "heldout_loss")
    if not train[0]:
        return None
    # matplotlib.figure and not pyplot, which keeps every figure and may ask for a display.
    figure_class = require_extra("matplotlib.figure").Figure
    figure = figure_class(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*train, color="tab:blue", alpha=0.35, linewidth=0.8)
    axes.plot(train[0], _smooth(train[1]), color="tab:blue", label="training loss")
    if heldout[0]:
        axes.plot(*heldout, "o-", color="tab:orange", markersize=4, label="held-out loss")
    if bigram_entropy is not None:
        axes.axhline(bigram_entropy, color="grey", linestyle="--", label="byte-bigram entropy")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.set_title(Path(directory).name, parse_math=False)  # a folder may have any name, such as a$b$
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(directory) / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path


def _curve(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in records if is_number(record.get(name))]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential average; divided by the sum of its weights, so that it does not start from 0."""
    smooth, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        smooth.append(total / norm)
    return smooth
