"""The plot of a run's experts: losses of the routers, and how evenly tokens are spread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import checked, require_extra
from jax_te.metrics.files import EXPERTS_PLOT, METRICS_FILE
from jax_te.metrics.writers import curve, is_number, read_records

_PREFIX, _TOKENS = "experts/", "tokens_per_expert"
"""Prefix and last part of the metrics' names, as `jax_te.training.make_train_step` gives them."""


@checked
def plot_experts(directory: str | os.PathLike[str]) -> Path | None:
    """Draw ``experts.png`` from a run's records.

    The picture has the routers' losses, without coefficients; the largest load of an expert over the mean one, and the
    share of choices that were dropped; and a heat map of the load of each expert over the mean one of its layer, a row
    for each expert, a column for each record that has it. Values above 2 have the colour of 2.

    Args:
        directory: the run's folder.

    Returns:
        The file's path; None if no record has metrics of experts.

    >>> import tempfile
    >>> from jax_te.metrics.log import MetricsLog
    >>> folder = tempfile.mkdtemp()
    >>> with MetricsLog(folder, writers=["jsonl"]) as log:
    ...     log.write(1, {"loss": 2.5, "experts/max_over_mean_load": 1.5})
    >>> plot_experts(folder).name
    'experts.png'
    """
    records = read_records(Path(directory) / METRICS_FILE)
    names = dict.fromkeys(name for record in records for name in record if name.startswith(_PREFIX))
    if not names:
        return None
    rows, steps, load = _load(records, [name for name in names if name.endswith(_TOKENS)])
    # A row for each expert stays readable up to this height; those of a larger model get thinner.
    below = min(0.12 * len(rows), 50.0) if rows else 0.0
    figure = require_extra("matplotlib.figure").Figure(figsize=(10, 6.0 + below), layout="constrained")
    heights = [2.5, 2.5, 1.0 + below][: 3 if rows else 2]
    panels = figure.subplots(len(heights), height_ratios=heights)
    overall = [name for name in names if name.count("/") == 1]
    _draw_curves(panels[0], records, [name for name in overall if name.endswith("_loss")], "loss")
    _draw_curves(panels[1], records, ["experts/max_over_mean_load"], "max / mean load")
    dropped = panels[1].twinx()
    _draw_curves(dropped, records, ["experts/dropped_share"], "dropped share", color="tab:red")
    if rows:
        image = panels[2].imshow(load, aspect="auto", interpolation="nearest", cmap="coolwarm", vmin=0.0, vmax=2.0)
        figure.colorbar(image, ax=panels[2], location="bottom", label="tokens of an expert / mean of its layer")
        panels[2].set_yticks(range(len(rows)), rows, fontsize=6, parse_math=False)
        marks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
        panels[2].set_xticks(marks, [str(steps[mark]) for mark in marks])
        panels[2].set_xlabel("step")
    path = Path(directory) / EXPERTS_PLOT
    figure.savefig(path, dpi=100)
    return path


def _draw_curves(axes: Any, records: list[dict[str, Any]], names: Sequence[str], label: str, **line: Any) -> None:
    """Draw metrics over steps, each under its own name."""
    for name in names:
        steps, values = curve(records, name)
        if steps:
            axes.plot(steps, values, linewidth=0.9, label=name.removeprefix(_PREFIX), **line)
    axes.set_ylabel(label)
    if len(names) > 1:
        axes.legend()


def _load(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[str], list[int], np.ndarray]:
    """Return names of rows, steps of columns, and the load of each expert over the mean one of its layer."""
    found = {name: {r["step"]: [*map(float, r[name])] for r in records if _is_vector(r.get(name))} for name in names}
    steps = sorted({step for vectors in found.values() for step in vectors})
    labels, rows = list[str](), list[list[float]]()
    for name, vectors in found.items():
        layer = name.removeprefix(_PREFIX).removesuffix(_TOKENS).removesuffix("/")
        for expert in range(max(map(len, vectors.values()), default=0)):
            labels.append(f"{layer} {expert}".strip())
            rows.append([_share(vectors.get(step, ()), expert) for step in steps])
    return labels, steps, np.array(rows)


def _share(tokens: Sequence[float], expert: int) -> float:
    """Return an expert's tokens over the mean; nan where there is no record, or a step without tokens."""
    mean = sum(tokens) / len(tokens) if tokens else 0.0
    return tokens[expert] / mean if expert < len(tokens) and mean > 0.0 else np.nan


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))
