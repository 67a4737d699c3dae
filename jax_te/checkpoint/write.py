"""Writing of a checkpoint through Orbax."""

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
    """Return Orbax's policy for the arguments of a `TrainCheckpointer`: a checkpoint that any rule keeps stays."""
    policies = ocp.training.preservation_policies
    kept: list[Any] = [policies.LatestN(keep)]
    if keep_every is not None:
        kept.append(policies.EveryNSteps(keep_every))
    if keep_best is not None:
        rank = partial(_rank, name=metric, sign=-1.0 if best == "min" else 1.0)
        kept.append(policies.BestN(get_metric_fn=rank, n=keep_best, keep_checkpoints_without_metrics=False))
    return policies.AnyPreservationPolicy(kept)


def _rank(metrics: Mapping[str, float] | None, *, name: str, sign: float) -> float:
    """Return a number that is larger for a better checkpoint; the smallest number without the metric."""
    value = sign * (metrics or {}).get(name, math.nan)
    return -math.inf if math.isnan(value) else value


def new_writer(directory: Path, kept: Any) -> ocp.training.Checkpointer:
    """Return Orbax's writer of a folder, from which it removes the remains of a killed save.

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
    """Return Orbax's response, whose ``result`` waits until everything is written."""
    body["checksums"] = checksums()
    # The metadata has its own checksum, since it holds those of the arrays. force: whether to save was decided by the
    # caller, not by a policy of Orbax.
    return writer.save_checkpointables_async(
        step, {STATE: nest(leaves)}, force=True, metrics=metrics or None, custom_metadata={**body, "crc32": crc32(body)}
    )


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Return the future of a call in its own thread.

    At exit a process waits for the thread, unless the thread could wait for another process.
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
    """Return a number that changes while a save makes progress: a checksum of names and sizes of the files.

    The first process, which assembles the checkpoint and removes older ones, reads the whole folder, the others only
    their own parts.
    """
    here = jax.process_index()
    pattern = "**/*" if here == 0 else f"{step}.*/*/ocdbt.process_{here}/**/*"
    files = []
    for path in directory.glob(pattern):
        with contextlib.suppress(OSError):  # renamed or removed since
            files.append((str(path), path.lstat().st_size))
    return zlib.crc32(repr(sorted(files)).encode())
