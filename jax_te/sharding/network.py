"""The links between devices: times of collectives, by data sheets or measured."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_te._text import parse_pairs
from jax_te._validation import check_annotations, checked

CHAINS = (4, 24)
"""Numbers of all-gathers in the two programs whose times are compared; the difference excludes the launch time of a
program."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """The collectives of one kind over the same axes of a mesh.

    Args:
        axes: mesh axes along which the devices of a group differ.
        kind: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all`` or ``collective-permute``.
        devices: number of devices in a group.
        count: number of collectives that run.
        launches: number of launches when XLA's GPU compiler has combined independent collectives, each of up to 30 MiB.
        bytes: bytes of their arrays on a device: the results of all-gathers, and the operands of the others.

    >>> CollectiveCount(axes=("tensor",), kind="all-reduce", devices=4, count=1, launches=1, bytes=400).sent
    600.0
    """

    axes: tuple[str, ...]
    kind: str
    devices: int
    count: int
    launches: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, by the ring algorithms: ``(n - 1) / n`` of the array, twice for an all-reduce;
        for a permutation the array.
        """
        if self.kind == "collective-permute":
            return float(self.bytes)
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) / self.devices


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between devices. The defaults are those of a host with eight H200s, by their data sheets.

    Args:
        devices_per_host: devices that follow each other in the mesh and share the fast links.
        intra_host: bytes/s that a device can send to those of its host (NVLink: 900 GB/s, both directions together).
        inter_host: bytes/s that a device can send to other hosts (one ConnectX-7 for each device: 400 Gbit/s).
        latency: seconds of a collective in addition to the time for its bytes. The default is NCCL's own figure for a
            ring (``baseLat`` in ``src/graph/tuning.cc``).

    Raises:
        ValueError: for a bandwidth or a number of devices that is not positive, or a negative latency.

    >>> Network.parse("devices_per_host=4,intra_host=300e9")
    Network(devices_per_host=4, intra_host=300000000000.0, inter_host=50000000000.0, latency=8.4e-06)
    """

    devices_per_host: int = 8
    intra_host: float = 450e9
    inter_host: float = 50e9
    latency: float = 8.4e-6

    def __post_init__(self) -> None:
        check_annotations(self, Network)
        for field in fields(self):
            value, low = getattr(self, field.name), 0 if field.name == "latency" else math.ulp(0.0)
            if not low <= value < math.inf:
                raise ValueError(f"{field.name} must be a number {'>=' if low == 0 else '>'} 0, got {value!r}")

    @classmethod
    @checked
    def parse(cls, text: str) -> Network:
        """Return the network of a text such as ``"intra_host=400e9,latency=1e-5"``; others are the defaults.

        Raises:
            ValueError: for an unknown or repeated name, and a value that is not a number.
        """
        kinds = {field.name: int if field.name == "devices_per_host" else float for field in fields(cls)}
        values: dict[str, float] = {}
        for name, value in parse_pairs(text, kinds, "field").items():
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise ValueError(f"{name} needs a number, got {value!r} in {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    @checked
    def measured(cls, devices: Sequence[Any] | None = None, *, mib: tuple[float, float] = (32.0, 128.0)) -> Network:
        """Return the network among devices of one host: the line through the times of all-gathers of two sizes.

        They run one after the other, and nothing else may run meanwhile. Links to other hosts are the default's.

        Args:
            devices: two or more devices. None: those of this process.
            mib: MiB of the arrays that all-gathers give on each device, the smaller first.

        Raises:
            ValueError: for a single device, and sizes that do not ascend.
            RuntimeError: if the larger size did not take longer.

        >>> Network.measured().intra_host  # doctest: +SKIP
        204000000000.0
        """
        devices = jax.local_devices() if devices is None else devices
        if len(devices) < 2:
            raise ValueError(f"links are measured between two devices or more, and there is {len(devices)}")
        if not 0 < mib[0] < mib[1]:
            raise ValueError(f"mib must be two sizes > 0, the smaller first, got {mib}")
        small, large = (_seconds_of_all_gather(devices, size * 2**20) for size in mib)
        sent = [size * 2**20 * (len(devices) - 1) / len(devices) for size in mib]
        if large <= small:
            raise RuntimeError(f"all-gathers of {mib} MiB took {small} and {large} s; measure while nothing else runs")
        speed = (sent[1] - sent[0]) / (large - small)
        latency = max(0.0, small - sent[0] / speed)
        return cls(devices_per_host=len(devices), intra_host=speed, latency=latency)

    @checked
    def seconds(self, row: CollectiveCount, mesh_shape: Mapping[str, int]) -> float:
        """Return the time that collectives of a mesh take, one after the other.

        In a ring every host sends over the links of all of its devices in the group, so that a group with ``m`` devices
        on each of its hosts has the bandwidth ``min(intra_host, m * inter_host)``. In an all-to-all a device sends each
        part over its own link; a permutation is as fast as the slowest link that it takes.

        >>> row = CollectiveCount(axes=("data",), kind="all-gather", devices=2, count=1, launches=1, bytes=200)
        >>> Network(devices_per_host=1, inter_host=10.0, latency=1.0).seconds(row, {"data": 2})
        11.0
        """
        if not {*row.axes} <= {*mesh_shape}:
            raise ValueError(f"mesh_shape must have the row's axes {row.axes}, got {dict(mesh_shape)}")
        hosts = _hosts(row.axes, mesh_shape, self.devices_per_host)
        near = max(1, row.devices // hosts)  # devices of a group on one host
        if hosts == 1:
            moving = row.sent / self.intra_host
        elif row.kind == "all-to-all":
            far, part = row.devices - near, row.bytes / row.devices
            moving = max(part * far / self.inter_host, part * (near - 1) / self.intra_host)
        else:
            links = 1 if row.kind == "collective-permute" else near
            moving = row.sent / min(self.intra_host, links * self.inter_host)
        return row.launches * self.latency + moving


def _hosts(axes: Sequence[str], mesh_shape: Mapping[str, int], per_host: int) -> int:
    """Return the maximum number of hosts of a group's devices."""
    sizes = tuple(mesh_shape.values())
    numbers = np.arange(math.prod(sizes)).reshape(sizes) // per_host
    along = [list(mesh_shape).index(axis) for axis in axes]
    groups = np.moveaxis(numbers, along, range(-len(along), 0)).reshape(-1, math.prod(sizes[axis] for axis in along))
    return int((np.diff(np.sort(groups, axis=1), axis=1) != 0).sum(axis=1).max(initial=0)) + 1


def _seconds_of_all_gather(devices: Sequence[Any], size: float) -> float:
    """Return the time of one all-gather whose result has ``size`` bytes on each device."""
    mesh = Mesh(np.array(devices), ("x",))

    def chained(length: int, x: jax.Array) -> jax.Array:
        token = jnp.zeros((), x.dtype)
        for _ in range(length):
            # The barrier orders them; otherwise XLA would combine them into one collective.
            x, _ = lax.optimization_barrier((x, token))
            token = lax.all_gather(x, "x", tiled=True)[0]
        return token[None]

    local, spec = max(1, round(size / 4 / len(devices))), PartitionSpec("x")
    x = jax.device_put(jnp.zeros(local * len(devices), jnp.float32), NamedSharding(mesh, spec))
    seconds = []
    with jax.set_mesh(mesh):
        for length in CHAINS:
            body = functools.partial(chained, length)
            run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
            jax.block_until_ready(run(x))
            times = []
            for _ in range(5):
                start = time.perf_counter()
                jax.block_until_ready(run(x))
                times.append(time.perf_counter() - start)
            seconds.append(statistics.median(times))
    return (seconds[1] - seconds[0]) / (CHAINS[1] - CHAINS[0])
