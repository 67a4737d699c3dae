"""The checkpoints of a run that count: all but damaged ones, and those that a run has gone back behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from jax_te._processes import gather_texts, is_first
from jax_te._validation import warn_caller
from jax_te.checkpoint.steps import StepNames, checkpoint_steps


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint could not be read: it counts no more, and the next save renames it. The message names it."""


class _WentBack(NamedTuple):
    """A restore of an earlier checkpoint.

    Args:
        step: step of that checkpoint.
        newest: step of the newest one then.
    """

    step: int
    newest: int


class RunSteps:
    """The checkpoints in a run's folder that count, and the renaming of those that are in the way of a save.

    Args:
        directory: folder of the checkpoints.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._damaged: set[int] = set()
        self._went_back: _WentBack | None = None
        self.names = StepNames(directory, self._damaged)

    def steps(self) -> list[int]:
        """Return the steps of finished checkpoints, without damaged ones: an unfinished one has a longer name."""
        return self.names.steps()

    def check_new(self, step: int) -> None:
        """Raise ValueError for a step that is not after the others, or whose folder is not a checkpoint."""
        steps, back = self.steps(), self._went_back
        if back is not None and self._goes_back(step):
            steps = [each for each in steps if each <= back.step]
        if step in steps:
            raise ValueError(f"step {step} is already saved in {self._directory}")
        newest = max(steps, default=-1)
        if step < newest:
            raise ValueError(
                f"step {step} comes before the newest checkpoint in {self._directory}, that of step {newest}, with "
                "which a run would go on. To go on from an earlier step, restore it with restore(step=...) of this "
                "TrainCheckpointer, which sets the later ones aside; for another run, give another folder"
            )
        path = self._directory / str(step)
        if step not in checkpoint_steps(self._directory) and os.path.lexists(path):
            raise ValueError(f"{path} is there, and is not a checkpoint; save in another folder, or another step")

    def go_back(self, step: int, newest: int) -> None:
        """Note that the run has restored a checkpoint, and which one was the newest then."""
        self._went_back = _WentBack(step, newest) if newest > step else None

    def go_on(self) -> None:
        """Note that the run goes on from the newest checkpoint."""
        self._went_back = None

    def mark_damaged(self, step: int) -> None:
        """Let a checkpoint count no more."""
        self._damaged.add(step)

    def unmark_damaged(self, step: int) -> None:
        """Let a checkpoint count again."""
        self._damaged.remove(step)

    def report_damaged(self, step: int, reason: str) -> None:
        """Let a checkpoint count no more, and warn of it."""
        self.mark_damaged(step)
        if is_first():  # all of them found it damaged
            warn_caller(f"checkpoint step {step} in {self._directory} is damaged: {reason}", DamagedCheckpointWarning)

    def is_in_the_way(self, step: int) -> bool:
        """Return whether other checkpoints must be renamed before a step is saved."""
        return bool(self._damaged) or self._goes_back(step)

    def rename_damaged(self) -> None:
        """Rename damaged checkpoints; all processes must call this."""
        self._rename(sorted(self._damaged), "damaged")
        self._damaged.clear()

    def set_later_aside(self, step: int) -> None:
        """Rename the checkpoints after the one to which the run went back, if it saves where it had been before."""
        back = self._went_back
        if back is None or not self._goes_back(step):
            return
        later = [each for each in self.steps() if each > back.step]
        self._rename(later, "abandoned")
        if is_first():
            names = ", ".join(f"{each}.abandoned" for each in later)
            text = "the run in %s went back to step %d; its later checkpoints are now %s"
            logging.getLogger("jax_te").warning(text, self._directory, back.step, names)

    def _goes_back(self, step: int) -> bool:
        """Return whether a run that went back to an earlier checkpoint saves where it had been before."""
        return self._went_back is not None and step <= self._went_back.newest

    def _rename(self, steps: list[int], suffix: str) -> None:
        # Several processes of a run share the folder: one of them renames.
        for step in steps if is_first() else ():
            target = self._directory / f"{step}.{suffix}"
            while target.exists():
                target = target.with_name(target.name + "+")
            (self._directory / str(step)).rename(target)
        gather_texts("renamed")  # none continues before
