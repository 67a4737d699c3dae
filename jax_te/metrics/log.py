"""A run's metrics, in the selected files and services, and the loss plot."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_te._processes import is_first
from jax_te._validation import brief, checked, require_extra
from jax_te.metrics.files import METRICS_FILE, PLOT_FILE, RECORD_FILES
from jax_te.metrics.writers import (
    JsonLinesWriter,
    MetricsWriter,
    Recorded,
    check_resume_step,
    check_writers,
    curve,
    open_writer,
    read_records,
)
from jax_te.typing import Array, WriterName


@checked
class MetricsLog:
    """Gives a run's metrics to its writers.

    - ``"jsonl"`` appends a record to ``metrics.jsonl``: one line, ``{"step": n, name: number, …}``. Resuming at a step
      removes the records of later ones, and one that was left unfinished, so that a run that was killed and resumed
      leaves the same file as an unbroken run, measured speeds apart. Other lines stay. Numbers that are not finite are
      null, vectors are lists.
    - ``"tensorboard"`` writes events in the folder ``tensorboard``, by tensorboardX.
    - ``"wandb"`` writes to a run of Weights & Biases, which a resumed run continues; its settings are those of the
      package ``wandb``.
    - Your own `MetricsWriter`.

    Writers other than ``"jsonl"`` get the numbers of a vector one by one, as ``name/0``, ``name/1``, ….

    Processes other than the first write nothing.

    Args:
        directory: the run's folder; made if missing.
        resume_step: step of the restored checkpoint: records of later steps are removed, and nothing else is. 0: a new
            run, for which those of all steps from 1 on are. None: a new run in a folder without records.
        writers: names, and writers of one's own.

    Raises:
        ModuleNotFoundError: for a writer whose package is not installed.
        ValueError, TypeError: for an unknown name, one that is given twice, and for an object that is not a writer;
            without a ``resume_step``, for a ``metrics.jsonl`` that is not empty.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with MetricsLog(folder, writers=["jsonl"]) as log:
    ...     log.write(1, {"loss": 2.5})
    >>> read_metrics(folder)
    [{'step': 1, 'loss': 2.5}]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        writers: Sequence[WriterName | MetricsWriter] = ("jsonl", "tensorboard"),
    ):
        check_resume_step(resume_step, Path(directory) / METRICS_FILE)
        # Scalars are the same in every process, and files of one folder cannot have several authors.
        self._writers: list[MetricsWriter] = []
        if is_first():
            check_writers(writers)
            Path(directory).mkdir(parents=True, exist_ok=True)
            found: dict[int, MetricsWriter] = {}
            with contextlib.ExitStack() as opened:
                # The one that cuts off the records behind the step comes last: one that fails to open costs none.
                for number in sorted(range(len(writers)), key=lambda number: writers[number] == "jsonl"):
                    found[number] = open_writer(writers[number], Path(directory), resume_step)
                    opened.callback(found[number].close)
                opened.pop_all()
            self._writers = [found[number] for number in range(len(writers))]

    def write(self, step: int, values: Mapping[str, float | Array], *, chart: bool = True) -> None:
        """Append one record.

        Args:
            step: the step's number.
            values: numbers by name, also as arrays ``[]``; and vectors ``[n]``, such as the tokens of each expert.
            chart: whether all writers get the metrics. False: ``metrics.jsonl`` alone, which can take every step of a
                long run.

        Raises:
            TypeError: for a value that is no number, such as None or a text.
            ValueError: for an array of more axes, and the name ``"step"``.
        """
        plain = _plain(values)
        for writer in self._writers:
            if isinstance(writer, JsonLinesWriter):
                writer.write(step, plain)
            elif chart:
                writer.write(step, _one_by_one(plain))

    def chart(self, step: int, values: Mapping[str, float | Array]) -> None:
        """Write values to all writers but ``metrics.jsonl``."""
        for writer in self._writers:
            if not isinstance(writer, JsonLinesWriter):
                writer.write(step, _one_by_one(_plain(values)))

    def sync(self) -> None:
        """Write all buffered data to the disk, e.g. before a checkpoint of the same step."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flush and close all writers, also if one of them fails."""
        with contextlib.ExitStack() as closing:
            for writer in reversed(self._writers):  # which it calls from the last to the first
                closing.callback(writer.close)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _plain(values: Mapping[str, float | Array]) -> dict[str, Recorded]:
    """Return numbers and vectors as JSON has them.

    Raises:
        TypeError: for what is no number.
        ValueError: for arrays of more axes, and for a metric with the name of a record's own field.
    """
    if "step" in values:
        raise ValueError("a record has the field step already; give the metric another name than 'step'")
    for name, value in values.items():
        dtype = np.asarray(value).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(f"metrics are numbers and vectors [n]; {name} is {brief(value)}; leave it out")
        if np.ndim(value) > 1:
            raise ValueError(f"metrics are numbers and vectors [n]; {name} has shape {list(np.shape(value))}")
    return {
        name: value if isinstance(value, int) else np.asarray(value, float).tolist() for name, value in values.items()
    }


def _one_by_one(values: Mapping[str, Recorded]) -> dict[str, int | float]:
    """Return the values with a name for each number of a vector."""
    found: dict[str, int | float] = {}
    for name, value in values.items():
        found |= {f"{name}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return found


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a run in order, without an unfinished last line (of a run that was killed)."""
    return read_records(Path(directory) / METRICS_FILE)


def last_recorded_step(directory: str | os.PathLike[str]) -> int:
    """Return the largest step of which a run has any record, of metrics or of precision; 0 if it has none."""
    steps = (record["step"] for name in RECORD_FILES for record in read_records(Path(directory) / name))
    return max(steps, default=0)


@checked
def plot_losses(
    directory: str | os.PathLike[str], *, unit: str = "token", bigram_entropy: float | None = None
) -> Path | None:
    """Draw ``loss.png`` from the run's records.

    Args:
        directory: the run's folder.
        unit: name of what the loss is a mean over, for the axis; ``"byte"`` if tokens are bytes.
        bigram_entropy: reference value, drawn as a horizontal line.

    Returns:
        The file's path; None if there is nothing to draw.
    """
    records = read_metrics(directory)
    train, heldout = curve(records, "loss"), curve(records, "heldout_loss")
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
    axes.set(xlabel="step", ylabel=f"nats per {unit}")
    axes.set_title(Path(directory).name, parse_math=False)  # a folder may have any name, such as a$b$
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(directory) / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Return the exponential average, divided by the sum of its weights, so that it does not start from 0."""
    smooth, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        smooth.append(total / norm)
    return smooth
