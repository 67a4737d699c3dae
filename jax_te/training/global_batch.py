"""Batches of several processes: one global array, assembled from the processes' parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jax_te._processes import Meetings, check_same, checksum, gather_texts
from jax_te._validation import check_axes, check_leaves
from jax_te.sharding import batch_axes, named_sharding
from jax_te.typing import PyTree


def global_batch(local: PyTree) -> PyTree:
    """Return the global batch, to which each process contributes the rows that its devices hold.

    Call it in every process, inside ``jax.set_mesh``. On a mesh whose axis ``data``, ``fsdp`` or ``expert`` crosses
    all processes, process ``i`` of ``n`` gives the ``i``-th of ``n`` equal parts. Processes that differ only along
    ``tensor`` or ``context`` hold the same rows and must pass the same arrays: their checksums are compared at each
    call, as are the shapes and dtypes of all processes. In one process the batch becomes a global array with the same
    values.

    Args:
        local: pytree of arrays ``[b / parts, ...]`` on the host.

    Returns:
        Arrays ``[b, ...]``, sharded over the logical axis ``batch``.

    Raises:
        ValueError: outside of ``jax.set_mesh``; if processes give arrays of different shapes or dtypes, such as the
            rest of an epoch, or those that hold the same rows different arrays.

    >>> from jax_te.config import ParallelConfig
    >>> from jax_te.sharding import make_mesh
    >>> with jax.set_mesh(make_mesh(ParallelConfig(data=1))):
    ...     global_batch({"tokens": np.ones((2, 8), np.int32)})["tokens"].shape  # (4, 8) where 2 processes call it
    (2, 8)
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("global_batch shards a batch over a mesh, and there is none; call it inside jax.set_mesh")
    check_leaves("local", local)
    for leaf in jax.tree.leaves(local):
        check_axes("a leaf of local", leaf)
    local = jax.tree.map(np.asarray, local)
    if jax.process_count() > 1:
        # Without this each process takes the global shape for a multiple of its own, and runs another program.
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), local)
        check_same({"shape or dtype of its arrays of a batch": shapes}, mesh.devices.flat)
        _check_same_rows(local, named_sharding(("batch",), mesh))

    def whole(leaf: np.ndarray) -> jax.Array:
        sharding = named_sharding(batch_axes(leaf.ndim), mesh)
        return jax.make_array_from_process_local_data(sharding, leaf)

    return jax.tree.map(whole, local)


def _check_same_rows(local: PyTree, sharding: NamedSharding) -> None:
    size = sharding.mesh.size  # any size that divides over all axes
    held: list[set[int]] = [set() for _ in range(jax.process_count())]
    for device, index in sharding.devices_indices_map((size,)).items():
        held[device.process_index].add(index[0].indices(size)[0])
    if len({frozenset(rows) for rows in held}) == len(held):
        return  # each process has rows of its own
    checksums = gather_texts(str(checksum(jax.tree.leaves(local))))
    for process, rows in enumerate(held):
        first = held.index(rows)
        if checksums[process] != checksums[first]:
            raise ValueError(
                f"processes {first} and {process} hold the same rows of a batch on this mesh, and gave global_batch "
                "different arrays; read the data by the rows that a process holds, not by its number"
            )


def require_global_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that, on a mesh of several processes, refuses batches that are not global.

    JAX assumes that host arrays are the same in every process, and where they differ, trains on a mixture of them.
    Whether there are several is asked in each call: a step may be made before ``jax.distributed.initialize()``.

    Args:
        step: jitted function of state and batch, whose ways to look at its program the result has, too.
    """

    def guarded(state: Any, batch: PyTree) -> Any:
        check_global(batch, state.step)
        return step(state, batch)

    return with_stages(guarded, step)


def with_stages(call: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a jitted step, with the step's name and its ways to look at its program."""
    functools.update_wrapper(call, step)
    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(call, name, getattr(step, name))
    return call


def check_global(batch: PyTree, arrays: PyTree) -> None:
    """Raise ValueError if ``arrays`` are on a mesh of several processes, and one of the batch is local to this process.

    Args:
        batch: batch; its arrays may be on the host.
        arrays: arrays in the same computation, e.g. a model's parameters.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1 or all(map(_is_local, jax.tree.leaves(arrays))):
        return
    for leaf in jax.tree.leaves(batch):
        if _is_local(leaf):
            raise ValueError(
                f"a batch of this process's own arrays, one of shape {np.shape(leaf)}, would be taken for all "
                f"of the batch of {jax.process_count()} processes; give jax_te.training.global_batch the rows "
                "of each process, or jax.device_put the same whole batch in each, with its sharding"
            )


def broadcast_from_first(text: str, arrays: PyTree) -> str:
    """Return the text of the process with the first device of the mesh that ``arrays`` are on, in all of them.

    It is this process's own text if the arrays are not on a mesh of several processes.

    Raises:
        OSError: if another process does not take part (TimeoutError), or has failed.
    """
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(arrays) if not _is_local(leaf)]
    if not meshes:
        return text
    with Meetings("broadcast_from_first") as meetings:
        return meetings.share(text, meshes[0].devices.flat[0].process_index)


def _is_local(leaf: Any) -> bool:
    if isinstance(leaf, Tracer):
        return False  # the caller's jit has placed it
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
