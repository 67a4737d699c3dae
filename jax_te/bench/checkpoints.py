"""Saving and restoring of a training state, next to plain Orbax."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jax_te.bench.settings import GIB, Row
from jax_te.checkpoint import TrainCheckpointer
from jax_te.training import TrainState

_NUMBERS = ("blocked_s", "stalled_s", "save_s", "restore_s")


def bench_checkpoints(state: TrainState, folder: Path, rounds: int, name: str) -> list[Row]:
    """Return two rows: of Orbax, which saves and restores the state's arrays as a list, and of `TrainCheckpointer`.

    They take turns. Each round of each writes a separate folder, which is removed. ``blocked_s`` is the time until a
    save returns, when a step may donate the state; ``stalled_s`` the time until a program has run to which all arrays
    were donated, and which waits for pending copies. ``copy_s`` is this time with a copy to pinned memory in place of
    the save, and ``beyond_copy_s`` the difference. ``save_s`` is the time until everything is written, ``restore_s``
    the time until it is on the devices again. Numbers are medians, ratios are Orbax's time over the row's. The first
    round does not count, and neither does the first save of a run, which does more.

    Args:
        state: a run's; its numbers are replaced by random ones. Orbax gets random keys as data, since it has no form
            for them.
        folder: folder on the file system to measure; made if missing.
        rounds: number of measured rounds.
        name: name of the state.

    Raises:
        OSError: if the folder cannot be written.

    >>> bench_checkpoints(state, Path("/scratch"), 3, "delayed")[1]["restore_ratio"]  # doctest: +SKIP
    """
    # Incompressible numbers, like those of a trained model; a new state has zeros.
    state = jax.tree.map(lambda leaf: _random(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state)
    leaves = [_data(leaf) for leaf in jax.tree.leaves(state)]
    size = sum(leaf.nbytes for leaf in leaves) / GIB
    folder.mkdir(parents=True, exist_ok=True)
    ways: dict[str, Callable[[Any, Path], list[float]]] = {
        "copy": _copy,
        "Orbax": lambda state, path: _orbax([_data(leaf) for leaf in jax.tree.leaves(state)], path),
        "jax_te": _jax_te,
    }
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, measure in ways.items():
            path = Path(tempfile.mkdtemp(dir=folder))
            try:
                # New arrays, as a step gives: those of an earlier save keep their values on the host.
                seconds = measure(jax.block_until_ready(jax.tree.map(jnp.copy, state)), path / "checkpoint")
                print(f"{way}: {seconds} s", file=sys.stderr, flush=True)
                if number:  # the first round grows the process and fills the pages of files
                    times[way].append(seconds)
            finally:
                shutil.rmtree(path)
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in times.items()}
    rows, (copy,) = [], medians.pop("copy")
    for way, numbers in medians.items():
        row: Row = {"name": f"{name}, {way}", "gib": round(size, 3), "arrays": len(leaves)}
        row |= {key: round(number, 3) for key, number in zip(_NUMBERS, numbers, strict=True)}
        row |= {"copy_s": round(copy, 3), "beyond_copy_s": round(numbers[1] - copy, 3)}
        ratios = zip(("save_ratio", "restore_ratio"), medians["Orbax"][2:], numbers[2:], strict=True)
        rows.append(row | {key: round(orbax / own, 3) for key, orbax, own in ratios})
    return rows


def _copy(state: TrainState, path: Path) -> list[float]:
    arrays = [_data(leaf) for leaf in jax.tree.leaves(state)]
    places = [leaf.sharding.with_memory_kind("pinned_host") for leaf in arrays]
    start = time.perf_counter()
    copies = jax.device_put(arrays, places)
    jax.block_until_ready(_overwritten(arrays))
    jax.block_until_ready(copies)
    return [time.perf_counter() - start]


def _orbax(arrays: list[Any], path: Path) -> list[float]:
    target = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in arrays]
    start = time.perf_counter()
    response: Any = ocp.save_checkpointables_async(f"{path}", {"state": arrays})
    blocked = time.perf_counter()
    new = jax.block_until_ready(_overwritten(arrays))
    stalled = time.perf_counter()
    response.result()
    written = time.perf_counter()
    del new
    jax.block_until_ready(ocp.load_checkpointables(f"{path}", {"state": target}))
    return [blocked - start, stalled - start, written - start, time.perf_counter() - written]


def _jax_te(state: TrainState, path: Path) -> list[float]:
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    arrays = [_data(leaf) for leaf in jax.tree.leaves(state)]
    with TrainCheckpointer(path) as checkpointer:
        # A run's first save also opens Orbax's writer and is read back, whatever its size.
        checkpointer.save({"first": jnp.zeros(1)}, None, step=0)
        checkpointer.wait()
        start = time.perf_counter()
        checkpointer.save(state, None, step=1)
        blocked = time.perf_counter()
        new = jax.block_until_ready(_overwritten(arrays))
        stalled = time.perf_counter()
        checkpointer.wait()
        written = time.perf_counter()
        del new
        restored, _, _ = checkpointer.restore(target)
        jax.block_until_ready(jax.tree.leaves(restored))
        return [blocked - start, stalled - start, written - start, time.perf_counter() - written]


@partial(jax.jit, donate_argnums=0)
def _overwritten(arrays: list[Any]) -> list[Any]:
    """Return other values in the same memory, as a train step would."""
    return [leaf + jnp.ones((), leaf.dtype) for leaf in arrays]


@jax.jit
def _random(leaf: Any) -> Any:
    # The product with the leaf gives XLA its sharding.
    return jax.random.normal(jax.random.key(0), leaf.shape).astype(leaf.dtype) + jnp.zeros_like(leaf) * leaf


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
