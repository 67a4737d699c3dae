"""A sharding as text: the devices that hold each shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jax_te._text import aligned
from jax_te.sharding.rules import entry_axes

SHOWN = 8
"""Maximum number of devices listed for one shard; longer lists are abbreviated."""


def mesh_axes_of(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of each of ``ndim`` dimensions.

    >>> mesh_axes_of(PartitionSpec(("data", "fsdp"), None, "tensor"), 4)
    (('data', 'fsdp'), (), ('tensor',), ())
    """
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return tuple(map(entry_axes, entries))


def draw_layout(spec: PartitionSpec, mesh_shape: Mapping[str, int], devices: Sequence[Any]) -> str:
    """Return a drawn grid of an array's shards with the devices that hold each.

    Columns are shards along the last sharded dimension, rows shards along the others; a single dimension is drawn as
    rows.

    Args:
        spec: spec of the array.
        mesh_shape: sizes of the mesh's axes by name.
        devices: numbers of the mesh's devices, in its order.

    >>> print(draw_layout(PartitionSpec(None, "tensor"), {"data": 2, "tensor": 2}, range(4)))
    tensor=0  0 2
    tensor=1  1 3
    >>> draw_layout(PartitionSpec(), {"data": 2}, range(2))
    'whole on 0 1'
    """
    names = list(mesh_shape)
    grid = np.asarray(devices).reshape(tuple(mesh_shape.values()))
    split = [axes for axes in mesh_axes_of(spec, len(spec)) if math.prod(mesh_shape[axis] for axis in axes) > 1]
    if not split:
        return f"whole on {_listed(grid.ravel())}"
    columns = _parts(split.pop(), mesh_shape) if len(split) > 1 else [{}]
    rows = [_joined(parts) for parts in itertools.product(*(_parts(axes, mesh_shape) for axes in split))]
    cells = [[_label(row)] for row in rows]
    for line, row in zip(cells, rows, strict=True):
        for column in columns:
            at = row | column
            line.append(_listed(grid[tuple(at.get(name, slice(None)) for name in names)].ravel()))
    if len(columns) > 1:
        cells.insert(0, ["", *map(_label, columns)])
    return "\n".join(aligned(cells))


def _parts(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the coordinates on ``axes`` of each shard of a dimension, in order."""
    axes = tuple(axis for axis in axes if mesh_shape[axis] > 1)
    ranges = (range(mesh_shape[axis]) for axis in axes)
    return [dict(zip(axes, at, strict=True)) for at in itertools.product(*ranges)]


def _joined(parts: tuple[dict[str, int], ...]) -> dict[str, int]:
    return {axis: at for part in parts for axis, at in part.items()}


def _label(at: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={index}" for axis, index in at.items())


def _listed(devices: np.ndarray) -> str:
    numbers = list(map(str, devices.tolist()))
    if len(numbers) > SHOWN:
        numbers = [*numbers[: SHOWN - 2], "...", numbers[-1]]
    return " ".join(numbers)
