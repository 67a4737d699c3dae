"""Records that a new run finds in its folder: whose they are, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

from jax_te.checkpoint import CHECKPOINT_FOLDER
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import changed_fields, differing_fields, listed_changes, read_config, refuse_links
from jax_te.metrics import PLOTS, RECORD_FILES, has_content, last_recorded_step

ABANDONED = ".abandoned"
"""Suffix of the records of a start that ended before its first checkpoint."""


def refuse_records(config: RunConfig, output: Path) -> None:
    """Raise ValueError if a folder without checkpoints has records or plots, where a new run would write its own.

    Records of a start of the same run that ended before its first checkpoint was complete are in order:
    `set_records_aside` renames them.
    """
    refuse_links(output)  # whose files are elsewhere
    found = [name for name in (*RECORD_FILES, *PLOTS) if has_content(output / name)]
    if not found:
        return
    saved, whose = read_config(output), "another run or program"
    if saved is not None:
        # The warm-up follows from the number of steps, which may be another one.
        others = [name for name in changed_fields(saved, vars(config)) if name != "warmup_steps"]
        if not others and _ended_before_a_checkpoint(saved, output):
            return
        if others:
            whose += f" ({listed_changes(saved, vars(config), others)})"
    raise ValueError(
        f"{output} has no checkpoints, but {', '.join(found)} of {whose}, and a new run would write there. "
        f"If this run had checkpoints, move them back to {output / CHECKPOINT_FOLDER}; else give another --output, or "
        "move these files away or delete them"
    )


def _ended_before_a_checkpoint(saved: RunConfig, output: Path) -> bool:
    """Return whether the records are those of a start that completed no checkpoint."""
    # A run makes the folder before its first record, and plots after a checkpoint. Its second save waits for the first
    # one, so that without a checkpoint there is no record behind the step of the second.
    return (
        (output / CHECKPOINT_FOLDER).is_dir()
        and not any(has_content(output / name) for name in PLOTS)
        and last_recorded_step(output) <= 2 * saved.save_every
    )


def set_records_aside(output: Path) -> list[str]:
    """Rename a run's records, and return the new names, which never were another file's."""
    renamed: list[str] = []
    for name in RECORD_FILES:
        if has_content(output / name):
            target = output / (name + ABANDONED)
            while target.exists():  # as `TrainCheckpointer` names checkpoints that a run has left
                target = target.with_name(target.name + "+")
            (output / name).rename(target)
            renamed.append(target.name)
    return renamed


def changes_there(config: RunConfig, output: Path, *, resumes: bool) -> str | None:
    """Return a line that compares a run's options with those that its folder has; None where there is nothing to say.

    Args:
        config: configuration of the run.
        output: folder of the run, whose ``config.json`` is that of the start before.
        resumes: whether the run has a checkpoint to go on from.
    """
    saved = read_config(output)
    if saved is None:
        return None
    names = differing_fields(saved, vars(config))
    listed = listed_changes(saved, vars(config), names)
    if resumes:
        return f"options that change from here: {listed}" if names else None
    there = f"a start in {output} that ended before its first checkpoint"
    return f"options other than those of {there}: {listed}" if names else f"options are those of {there}"
