"""Statistics of a run's quantized tensors: ``precision.jsonl`` and the heat maps of ``precision.png``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._processes import is_first
from jax_te._validation import brief, checked, require_extra
from jax_te.metrics.files import PRECISION_FILE, PRECISION_PLOT
from jax_te.metrics.writers import check_resume_step, cut_after, is_number, read_records
from jax_te.quantize import STATISTICS
from jax_te.training import TensorStatistics

_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], float, float | None], ...] = (
    ("relative error, dB", lambda record: _decibels(record["relative_mse"]), -60.0, 0.0),
    ("underflow, %", lambda record: _percent(record["underflow"]), 0.0, None),
    ("saturation, %", lambda record: _percent(record["saturation"]), 0.0, None),
)
"""Title, function of a record, and the ends of the colour scale; None as the upper end: the largest value."""


@checked
class PrecisionLog:
    """Appends the statistics of inspected steps to ``precision.jsonl``, a line for each tensor.

    A line is ``{"step": n, "module": path, "role": role, "format": name, amax, scale, …}``; numbers that are not finite
    are null. Resuming at a step removes the lines of later ones, as `MetricsLog` does. Processes other than the first
    write nothing.

    Args:
        directory: the run's folder; made if missing.
        resume_step: step of the restored checkpoint: records of later steps are removed, and nothing else is. 0: a new
            run, for which those of all steps from 1 on are. None: a new run in a folder without records.

    Raises:
        ValueError: for a ``resume_step`` that is not an integer >= 0, below 2^63; without one, for a
            ``precision.jsonl`` that is not empty.

    >>> import tempfile
    >>> values = dict.fromkeys(STATISTICS, 0.5)
    >>> log = PrecisionLog(tempfile.mkdtemp())
    >>> log.write(10, [TensorStatistics(module="layers.0.proj", role="x", format="e4m3", **values)])
    >>> read_precision(log.directory)[0]["underflow"]
    0.5
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None):
        self.directory = Path(directory)
        check_resume_step(resume_step, self.directory / PRECISION_FILE)
        if is_first():
            self.directory.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                cut_after(self.directory / PRECISION_FILE, resume_step)

    def write(self, step: int, statistics: Iterable[TensorStatistics]) -> None:
        """Append a step's statistics, and write them to the disk."""
        if not is_first():
            return
        statistics = list(statistics)
        for tensor in statistics:
            if not isinstance(tensor, TensorStatistics):
                raise TypeError(f"statistics must be those of inspect_precision, got {brief(tensor)}")
        lines = [json.dumps({"step": step} | plain_values(tensor)) + "\n" for tensor in statistics]
        with (self.directory / PRECISION_FILE).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            # As in MetricsLog: a checkpoint must never be newer than the records of its step.
            os.fsync(file.fileno())


def plain_values(tensor: TensorStatistics) -> dict[str, Any]:
    """Return a tensor's statistics as JSON can hold them: numbers that are not finite are None.

    >>> values = dict.fromkeys(STATISTICS, math.inf)
    >>> plain_values(TensorStatistics(module="proj", role="x", format="e4m3", **values))["amax"] is None
    True
    """
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(tensor).items()
    }


def chart_values(statistics: Iterable[TensorStatistics]) -> dict[str, float]:
    """Return the statistics by TensorBoard tag: ``precision/<module>/<role>/<statistic>``.

    >>> values = dict.fromkeys(STATISTICS, 1.0)
    >>> list(chart_values([TensorStatistics(module="proj", role="x", format="e4m3", **values)]))[0]
    'precision/proj/x/amax'
    """
    return {
        f"precision/{tensor.module}/{tensor.role}/{name}": getattr(tensor, name)
        for tensor in statistics
        for name in STATISTICS
    }


def read_precision(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a run's ``precision.jsonl`` in order, without damaged ones and an unfinished last line."""
    return [record for record in read_records(Path(directory) / PRECISION_FILE) if _whole(record)]


def _whole(record: Mapping[str, Any]) -> bool:
    texts = [record.get(name) for name in ("module", "role", "format")]
    printable = all(isinstance(text, str) and text.isprintable() for text in texts)
    return printable and all(
        name in record and (record[name] is None or is_number(record[name])) for name in STATISTICS
    )


@checked
def plot_precision(directory: str | os.PathLike[str]) -> Path | None:
    """Draw ``precision.png`` from a run's records.

    The picture has three heat maps: relative error, underflow and saturation. A row is a tensor, a column an inspected
    step. Grey is a value that is not finite, or a tensor that was not quantized at that step.

    Args:
        directory: the run's folder.

    Returns:
        The file's path; None if there are no records.
    """
    records = read_precision(directory)
    if not records:
        return None
    rows = list(dict.fromkeys((record["module"], record["role"]) for record in records))
    steps = sorted({record["step"] for record in records})
    # A row for each tensor stays readable up to this height; a deeper model's rows get thinner.
    height = min(2.0 + 0.17 * len(rows), 60.0)
    figure = require_extra("matplotlib.figure").Figure(figsize=(16, height), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (title, value, low, high) in zip(panels, _PANELS, strict=True):
        colours = require_extra("matplotlib").colormaps["viridis"].with_extremes(bad="lightgrey")
        grid = _grid(records, rows, steps, value)
        if high is None:
            # At least 0.1 %: with a scale that ends at the largest value, noise would look like a catastrophe.
            high = max(0.1, float(np.max(grid, initial=0.0, where=np.isfinite(grid))))
        image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=high)
        figure.colorbar(image, ax=axes, location="top", label=title)
        # Eight labels fit beside each other; unique, because few steps round to the same mark.
        marks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
        axes.set_xticks(marks, [str(steps[mark]) for mark in marks])
        axes.set_xlabel("step")
    labels = [f"{module} {role}" for module, role in rows]
    panels[0].set_yticks(range(len(rows)), labels, fontsize=7, parse_math=False)
    path = Path(directory) / PRECISION_PLOT
    figure.savefig(path, dpi=100)
    return path


def _grid(
    records: list[dict[str, Any]],
    rows: list[tuple[str, str]],
    steps: list[int],
    value: Callable[[Mapping[str, Any]], float | None],
) -> np.ndarray:
    """``[rows, steps]``, nan where there is no value."""
    row_of = {row: index for index, row in enumerate(rows)}
    column_of = {step: index for index, step in enumerate(steps)}
    grid = np.full((len(rows), len(steps)), np.nan)
    for record in records:
        number = value(record)
        if number is not None:
            grid[row_of[record["module"], record["role"]], column_of[record["step"]]] = number
    return grid


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def _decibels(relative: float | None) -> float | None:
    """Finite, so that it has a colour: an exact tensor is at the lower end of the scale."""
    return None if relative is None else 10.0 * math.log10(max(relative, 1e-30))
