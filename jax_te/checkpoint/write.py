"""Writing a checkpoint through Orbax."""

from __future__ import annotations

import contextlib
import math
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint.folder import Folder
from jax_te.checkpoint.tree import STATE, Name, crc32, nest

T = TypeVar("T")

_NO_BOUND = 7 * 24 * 3600
"""Seconds."""


def kept_by(keep: int, keep_every: int | None, keep_best: int | None, metric: str, best: Literal["min", "max"]) -> Any:
    """Return Orbax's policy for the arguments of a `TrainCheckpointer`: what one of the rules keeps stays."""
    policies = ocp.training.preservation_policies
    kept: list[Any] = [policies.LatestN(keep)]
    if keep_every is not None:
        kept.append(policies.EveryNSteps(keep_every))
    if keep_best is not None:
        rank = partial(_rank, name=metric, sign=-1.0 if best == "min" else 1.0)
        kept.append(policies.BestN(get_metric_fn=rank, n=keep_best, keep_checkpoints_without_metrics=False))
    return policies.AnyPreservationPolicy(kept)


def _rank(metrics: Mapping[str, float] | None, *, name: str, sign: float) -> float:
    """Return a number that is larger for a better checkpoint; of one that has no such metric, the smallest."""
    value = sign * (metrics or {}).get(name, math.nan)
    return -math.inf if math.isnan(value) else value


def new_writer(directory: Path, kept: Any) -> ocp.training.Checkpointer:
    """Return Orbax's writer of a folder, in which it removes what a killed save left.

    Raises:
        ValueError: if a checkpoint's metadata is malformed.
    """
    context = ocp.Context()
    # Random floating-point numbers, as parameters nearly are, lose a tenth of their size, and a save of them takes
    # two to four times as long.
    context.array.saving.use_compression = False
    # Orbax counts from the start of a save, however it gets on; `TrainCheckpointer` has a bound of its own.
    if jax.process_count() > 1:
        context.asynchronous.timeout_secs = _NO_BOUND
    # Otherwise Orbax waits for the folders by the number of the operation, which is one for the whole process: a call
    # in another thread meanwhile would change it, and the save would wait for ever, or find folders of its own.
    if jax.process_count() == 1:
        context.asynchronous.create_directories_asynchronously = False
    options: dict[str, Any] = {"preservation_policy": kept, "cleanup_tmp_directories": True}
    return ocp.training.Checkpointer(Folder(directory), context=context, **options)


def call_orbax(
    writer: ocp.training.Checkpointer,
    step: int,
    leaves: dict[Name, Any],
    body: dict[str, Any],
    checksums: Callable[[], dict[str, int]],
    metrics: dict[str, Any],
) -> Any:
    """Return Orbax's response, whose ``result`` waits until all is written."""
    body["checksums"] = checksums()
    # The metadata has a checksum of its own, since it holds those of the arrays. force: whether to save was decided by
    # the caller, not by a policy of Orbax.
    return writer.save_checkpointables_async(
        step, {STATE: nest(leaves)}, force=True, metrics=metrics or None, custom_metadata={**body, "crc32": crc32(body)}
    )


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Return the future of a call in a thread of its own.

    At its end a process waits for the thread, but not where it could wait for another process.
    """
    if jax.process_count() > 1:
        future = Future[T]()
        threading.Thread(target=_fill, args=(future, call, args), name="jax_te-save", daemon=True).start()
        return future
    executor = ThreadPoolExecutor(1, "jax_te-save")
    try:
        return executor.submit(call, *args)
    finally:
        executor.shutdown(wait=False)


def _fill(future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:
        future.set_exception(error)


def size_of_save(directory: Path, step: int) -> int:
    """Return a number that changes while a save gets on: a checksum of names and sizes of the files.

    The first process, which puts the checkpoint together and removes older ones, looks at the whole folder, the others
    at their own parts.
    """
    here = jax.process_index()
    pattern = "**/*" if here == 0 else f"{step}.*/*/ocdbt.process_{here}/**/*"
    files = []
    for path in directory.glob(pattern):
        with contextlib.suppress(OSError):  # renamed or removed since
            files.append((str(path), path.lstat().st_size))
    return zlib.crc32(repr(sorted(files)).encode())
