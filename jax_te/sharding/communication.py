"""Collective communication of a program on a mesh: counts, bytes, and estimated times."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered

from jax_te._text import table
from jax_te._validation import checked
from jax_te.sharding.network import CollectiveCount, Network
from jax_te.sharding.program import Moved, collectives_of

COMBINED_BYTES = 30 * 1024 * 1024 + 7
"""XLA's GPU compiler combines independent collectives up to this size (``kDefault...CombineThreshold``)."""


@dataclass(frozen=True, kw_only=True)
class CommunicationReport:
    """Result of `communication_report`. ``str()`` gives a table.

    Args:
        rows: rows of the report, one for each kind of collective and combination of axes, in the order of the axes.
        mesh_shape: sizes of the mesh's axes by name.
        network: network for which times are estimated.

    >>> row = CollectiveCount(axes=("data",), kind="all-reduce", devices=2, count=1, launches=1, bytes=4 * 2**20)
    >>> print(CommunicationReport(rows=(row,), mesh_shape={"data": 2}, network=Network(latency=0.0)))
    axes  collective  devices  number  launches  MiB  MiB sent  GB/s     ms
    ----  ----------  -------  ------  --------  ---  --------  ----  -----
    data  all-reduce        2       1         1  4.0       4.0   450  0.009
    sum                             1         1  4.0       4.0        0.009
    """

    rows: tuple[CollectiveCount, ...]
    mesh_shape: dict[str, int]
    network: Network

    @property
    def sent(self) -> float:
        """Bytes that each device sends."""
        return sum(row.sent for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of all collectives, one after the other; overlap with computation hides a part of it."""
        return sum(self.row_seconds())

    def row_seconds(self) -> list[float]:
        """Seconds of each row."""
        return [self.network.seconds(row, self.mesh_shape) for row in self.rows]

    def __str__(self) -> str:
        header = ("axes", "collective", "devices", "number", "launches", "MiB", "MiB sent", "GB/s", "ms")
        return table(header, list(self._cells()), right=len(header) - 2)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row, seconds in zip(self.rows, self.row_seconds(), strict=True):
            moving = seconds - row.launches * self.network.latency
            speed = f"{row.sent / moving / 1e9:,.0f}" if moving > 0 else "-"
            yield ("*".join(row.axes), row.kind, f"{row.devices:,}", *_sizes([row]), speed, f"{1e3 * seconds:,.3f}")
        yield ("sum", "", "", *_sizes(self.rows), "", f"{1e3 * self.seconds:,.3f}")


@checked
def communication_report(
    program: Lowered | Compiled | str, mesh: Mesh | AbstractMesh | None = None, *, network: Network | None = None
) -> CommunicationReport:
    """Count the collectives of a program, by the axes of the mesh that they span, and estimate their time.

    Args:
        program: ``step.lower(state, batch)``, where state and batch may be ``jax.ShapeDtypeStruct``. It is compiled,
            and counted is what XLA's SPMD partitioner gave, before the passes in which CPU and GPU differ: a program
            that is lowered for CPU devices has the collectives of one for as many GPUs, in their dtypes. Or a compiled
            program or its text, counted as it is.
        mesh: mesh of the program. None: the one in use.
        network: links of the mesh's devices. None: hosts with eight H200s.

    Returns:
        A `CommunicationReport`. Its times are sums over all collectives, as if none overlapped with another or with
        computation.

    Raises:
        ValueError: without a mesh; for a program of another mesh; for a loop with collectives and an unknown number of
            iterations.
        RuntimeError: if XLA does not write the partitioned program.

    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    >>> communication_report(jax.jit(lambda x: x.sum(0)).lower(x), mesh).rows  # one device sends nothing
    ()
    """
    on = jax.sharding.get_mesh() if mesh is None else mesh
    if on.empty:
        raise ValueError("collectives are counted by the axes of a mesh, and there is none; give mesh=, or set one")
    text = partitioned_text(program) if isinstance(program, Lowered) else program
    text = text.as_text() or "" if isinstance(text, Compiled) else text
    shape = {str(name): size for name, size in on.shape.items()}
    rows = count_rows(list(collectives_of(text, shape)), shape)
    return CommunicationReport(rows=rows, mesh_shape=shape, network=network or Network())


def partitioned_text(program: Lowered) -> str:
    """Return a program as XLA's SPMD partitioner writes it."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options["xla_dump_hlo_pass_re"] = "spmd-partitioning|call-inliner"  # and what puts its pieces into one
        # What follows the partitioner is thrown away: compile it as cheaply as possible.
        options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        with without_compile_cache():
            program.compile(options)
        # Numbered in the order of the passes. A program for one device has no such pass.
        found = sorted(Path(folder).glob("*.spmd-partitioner.after_*"))
        whole = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.before_optimizations.txt")]
        if not found and len(whole) == 1 and "num_partitions=" not in whole[0].partition("\n")[0]:
            return whole[0]
        if not any("after_spmd-partitioning" in path.name for path in found):
            raise RuntimeError("XLA wrote no partitioned program; compile it, and give communication_report its text")
        return found[-1].read_text(encoding="utf-8")


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Yield without JAX's persistent cache: for a cached program XLA would compile, and thus write, nothing."""
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX reads the option only until it has opened a folder
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        reset_cache()


def count_rows(found: Sequence[Moved], mesh_shape: Mapping[str, int]) -> tuple[CollectiveCount, ...]:
    """Return the sums of collectives by axes and kind."""
    groups: dict[tuple, list[Moved]] = defaultdict(list)
    for moved in found:
        groups[moved.axes, moved.kind, moved.devices].append(moved)
    order = list(mesh_shape)
    rows = []
    for axes, kind, devices in sorted(groups, key=lambda key: ([order.index(axis) for axis in key[0]], key[1:])):
        alike = groups[axes, kind, devices]
        rows.append(
            CollectiveCount(
                axes=axes,
                kind=kind,
                devices=devices,
                count=sum(moved.times for moved in alike),
                launches=_launches(alike),
                bytes=sum(moved.times * moved.bytes for moved in alike),
            )
        )
    return tuple(rows)


def _launches(found: Sequence[Moved]) -> int:
    """Return how often collectives are launched: XLA combines those that are alike and do not wait for each other."""
    together: dict[tuple, list[Moved]] = defaultdict(list)
    for moved in found:
        together[moved.alike, moved.level, moved.times].append(moved)
    return sum(
        times * min(len(parts), math.ceil(sum(part.bytes for part in parts) / COMBINED_BYTES))
        for (_, _, times), parts in together.items()
    )


def _sizes(rows: Sequence[CollectiveCount]) -> tuple[str, ...]:
    numbers = (f"{sum(row.count for row in rows):,}", f"{sum(row.launches for row in rows):,}")
    return (*numbers, *(f"{sum(size) / 2**20:,.1f}" for size in ((r.bytes for r in rows), (r.sent for r in rows))))
