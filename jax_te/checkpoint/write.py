"""Writing of a checkpoint through Orbax."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint.folder import Folder
from jax_te.checkpoint.steps import StepNames, checkpoint_steps, remove_checkpoint
from jax_te.checkpoint.tree import STATE, Name, crc32, nest

_NO_BOUND = 7 * 24 * 3600
"""A timeout of Orbax, in seconds, that no save reaches."""


@dataclass(frozen=True)
class Keep:
    """Rules for the checkpoints to keep, see `TrainCheckpointer`: one that any of them keeps stays.

    Args:
        newest: number of checkpoints with the largest steps.
        every: interval of steps.
        best: number of best checkpoints by a metric.
        metric: name of the metric.
        better: whether its smallest or its largest value is the best.
    """

    newest: int
    every: int | None
    best: int | None
    metric: str
    better: Literal["min", "max"]

    def kept(self, metrics: Mapping[int, Mapping[str, float] | None]) -> set[int]:
        """Return the steps to keep of those with these metrics, None for one that was saved without any.

        >>> sorted(Keep(1, 10, 1, "loss", "min").kept({10: None, 11: {"loss": 1.0}, 12: {"loss": 2.0}, 13: None}))
        [10, 11, 13]
        """
        steps = sorted(metrics)
        kept = set(steps[-self.newest :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            measured = [step for step in steps if metrics[step] is not None]
            kept |= set(sorted(measured, key=lambda step: self._rank(metrics[step]))[-self.best :])
        return kept

    def _rank(self, metrics: Mapping[str, float] | None) -> float:
        """Return a number that is larger for a better checkpoint; the smallest number without the metric."""
        value = (metrics or {}).get(self.metric, math.nan)
        return -math.inf if math.isnan(value) else -value if self.better == "min" else value


def remove_others(writer: ocp.training.Checkpointer, directory: Path, keep: Keep) -> None:
    """Remove the checkpoints that no rule keeps.

    Not by Orbax: to it every folder with a number as its name is a checkpoint, the newest is the one saved last, and
    one that it removes is there in part meanwhile.
    """
    there = set(checkpoint_steps(directory))
    metrics: Any = {found.step: found.metrics for found in writer.checkpoints if found.step in there}
    for step in sorted(metrics.keys() - keep.kept(metrics)):
        remove_checkpoint(directory, step)


def new_writer(directory: Path, names: StepNames) -> ocp.training.Checkpointer:
    """Return Orbax's writer of a folder, from which it removes the remains of a killed save.

    Args:
        directory: folder of the checkpoints.
        names: names of those that count.

    Raises:
        ValueError: if a checkpoint's metadata is malformed.
    """
    context = ocp.Context()
    # Compression shrinks nearly random floating-point numbers, such as parameters, by a tenth, and makes a save two to
    # four times as long.
    context.array.saving.use_compression = False
    # Orbax measures from the start of a save, regardless of progress; `TrainCheckpointer` has its own timeout.
    if jax.process_count() > 1:
        context.asynchronous.timeout_secs = _NO_BOUND
    # Otherwise Orbax waits for the folders by the number of the operation, which is one for the whole process: a
    # concurrent call in another thread would change it, and the save would wait forever, or find its own folders.
    if jax.process_count() == 1:
        context.asynchronous.create_directories_asynchronously = False
    options: dict[str, Any] = {"step_name_format": names, "cleanup_tmp_directories": True}
    return ocp.training.Checkpointer(Folder(directory), context=context, **options)


def call_orbax(
    writer: ocp.training.Checkpointer,
    step: int,
    leaves: dict[Name, Any],
    body: dict[str, Any],
    checksums: Callable[[], dict[str, int]],
    metrics: dict[str, Any],
) -> Any:
    """Return Orbax's response, whose ``result`` waits until everything is written."""
    body["checksums"] = checksums()
    # The metadata has its own checksum, since it holds those of the arrays. force: whether to save was decided by the
    # caller, not by a policy of Orbax.
    return writer.save_checkpointables_async(
        step, {STATE: nest(leaves)}, force=True, metrics=metrics or None, custom_metadata={**body, "crc32": crc32(body)}
    )


def size_of_save(directory: Path, step: int) -> int:
    """Return a number that changes while a save makes progress: a checksum of names and sizes of the files.

    The first process, which assembles the checkpoint and removes older ones, reads the whole folder, the others only
    their own parts.
    """
    here = jax.process_index()
    roots = [os.fspath(directory)]
    if here > 0:
        roots = glob.glob(os.path.join(glob.escape(roots[0]), f"{step}.*", "*", f"ocdbt.process_{here}"))
    files = []
    # Not Path.glob, which raises on Python 3.11 if a folder is renamed or removed while it is listed, as a commit does.
    for root in roots:
        for folder, _, names in os.walk(root):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):  # renamed or removed since
                    files.append((path, os.lstat(path).st_size))
    return zlib.crc32(repr(sorted(files)).encode())
