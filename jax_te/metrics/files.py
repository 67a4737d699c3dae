"""Files that metrics, plots and traces write in a run's folder."""

from __future__ import annotations

from pathlib import Path

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
EXPERTS_PLOT = "experts.png"
PRECISION_FILE = "precision.jsonl"
PRECISION_PLOT = "precision.png"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_id"

KERNEL_TIMES_FILE = "kernel_times.json"
"""Name of a file in the folder of a `StepTrace`."""

PARTIAL = ".partial"
"""Suffix of an incomplete file."""

RECORD_FILES = (METRICS_FILE, PRECISION_FILE)
"""Files of records, which a run appends to."""
PLOTS = (PLOT_FILE, EXPERTS_PLOT, PRECISION_PLOT)
"""Files that are drawn from the records, anew at each end of a run."""
_IN_RUN = (*RECORD_FILES, *(name + PARTIAL for name in RECORD_FILES), *PLOTS, WANDB_ID_FILE)


def metrics_files(directory: Path, profile: Path) -> list[Path]:
    """Return the files that this package may write in a run's folder, whether they exist or not.

    Writers take their names from this module; a new name must be listed here, too.

    Args:
        directory: the run's folder.
        profile: folder of the run's `StepTrace`.

    >>> [path.name for path in metrics_files(Path("run"), Path("run/profile"))][-2:]
    ['wandb_id', 'kernel_times.json']
    """
    named = [*(directory / name for name in _IN_RUN), profile / KERNEL_TIMES_FILE]
    # TensorBoard's files are named by time and host; a resumed run may go on beside earlier ones.
    return named + sorted((directory / TENSORBOARD_FOLDER).glob("*"))
