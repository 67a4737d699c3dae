"""Compiled train steps that are measured in turn, and the states that they step."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jax_te.bench.compiling import compile_and_time
from jax_te.bench.settings import GIB, Row, Settings
from jax_te.bench.traces import traced
from jax_te.metrics import KernelTimes

_ALLOCATED = 1.6
"""Ratio of JAX's GPU memory to XLA's figure: 48.9 GiB for a step of 31.7 (llama-1b on an H100), and a margin."""


class SharedState:
    """The state that several contestants step in turn, created when it is first taken.

    When a contestant fails, the state is lost, since a step donates its buffers: it is then created again.

    >>> state = SharedState(lambda: "new")
    >>> state.put(state.take() + "er")
    >>> state.take()
    'newer'
    """

    def __init__(self, create: Callable[[], Any]):
        self._create, self._held = create, None

    def take(self) -> Any:
        """Return the state, which the caller owns until `put`."""
        # Not kept here while it is out: a step donates its buffers, and a second reference would keep them alive.
        held, self._held = self._held, None
        return self._create() if held is None else held

    def put(self, state: Any) -> None:
        """Return the state after some steps."""
        self._held = state


@dataclass
class Contestant:
    """A train step and its measurements; a subclass defines how it begins and takes steps.

    Args:
        name: name of the row.

    Attributes:
        compile_s, seconds: seconds to compile, and seconds of a step in each round.
        error: reason why it has no measurements.
        times: times of its kernels, if they were traced.
    """

    name: str
    compile_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    times: KernelTimes | None = None

    def launch(self) -> None:
        """Start preparations that can overlap with others'; by default nothing."""

    def begin(self) -> None:
        """Prepare it; a `CompiledStep` is compiled, and its state not created yet."""
        self._try(self._begin)

    def start(self, arrays: Any, calls: int) -> None:
        """Take a round's steps, which do not count, unless it has failed before.

        The first of a program also loads it, and several in flight need more memory than one, which the process takes
        from the driver when it first needs it: without these, first rounds took as much as 35 % longer than others.
        """
        if self.error is None:
            self._try(lambda: self._steps(arrays, calls))

    def round(self, arrays: Any, calls: int) -> None:
        """Take this many steps and note their mean time, unless it has failed before.

        A step before them does not count. After another contestant's turn it may find its arrays at other addresses,
        for which CUDA graphs must be updated; a program that runs alone finds them where they were.
        """
        if self.error is None:
            self._try(lambda: self._steps(arrays, 1))
        if self.error is None:
            self._try(lambda: self.seconds.append(self._steps(arrays, calls)))

    def trace(self, arrays: Any, folder: Path) -> None:
        """Trace some steps into a folder in this one, and note their kernels' times, unless it has failed before."""
        if self.error is None:
            self._try(lambda: self._trace(arrays, folder))

    def close(self) -> None:
        """Release resources outside of this process; by default nothing."""

    def _begin(self) -> None:
        raise NotImplementedError

    def _steps(self, arrays: Any, calls: int) -> float:
        """Return the mean seconds of a step over this many."""
        raise NotImplementedError

    def _trace(self, arrays: Any, folder: Path) -> None:
        self.times = traced(self.name, lambda calls: self._steps(arrays, calls), folder)

    def _try(self, action: Callable[[], object]) -> None:
        """Run a part of a measurement; its exception becomes the row's error."""
        try:
            action()
        except Exception as error:  # a compiler or a GPU can fail in many ways
            self.error = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if self.error is not None:
            self.close()
            gc.collect()  # the traceback's objects may hold most of the memory

    @property
    def memory(self) -> dict[str, float]:
        """The contestant's ``peak_gib``, if it is known."""
        return {}

    @property
    def free_bytes(self) -> int | None:
        """Free bytes of a device once it is ready; None if it uses JAX's memory."""
        return None


@dataclass
class CompiledStep(Contestant):
    """A train step that JAX compiles.

    Args:
        name: name of the row.
        state: initial state of the step.
        lower: ``() -> jax.stages.Lowered`` of ``(state, tokens) -> (state, result)``.
        prepare: function that converts another contestant's state for this step without copies.
        finish: its inverse, after the last of some steps.
    """

    state: SharedState = field(kw_only=True)
    lower: Callable[[], Any] = field(kw_only=True)
    prepare: Callable[[Any], Any] = lambda state: state
    finish: Callable[[Any], Any] = lambda state: state
    compiled: Any = None

    def _begin(self) -> None:
        self.compiled, self.compile_s = compile_and_time(self.lower)
        print(f"compiled {self.name} in {self.compile_s:.1f} s", file=sys.stderr, flush=True)

    def _steps(self, arrays: Any, calls: int) -> float:
        # Waits first, so that no work of the previous contestant is timed.
        state, result = jax.block_until_ready(self.prepare(self.state.take())), None
        start = time.perf_counter()
        for _ in range(calls):
            state, result = self.compiled(state, arrays)
        jax.block_until_ready(result)
        seconds = (time.perf_counter() - start) / calls
        self.state.put(self.finish(state))
        return seconds

    @property
    def memory(self) -> dict[str, float]:
        """GiB of its arguments, results and temporary arrays by XLA's analysis, and of what it keeps on the host."""
        analysis = None if self.compiled is None else self.compiled.memory_analysis()
        if analysis is None:
            return {}
        host = analysis.host_temp_size_in_bytes
        # Outputs that take over arguments' buffers are not counted again.
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        peak = (analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes) / GIB
        return {"peak_gib": round(peak, 4)} | ({"host_gib": round(host / GIB, 4)} if host else {})


def run_contestants(contestants: Sequence[Contestant], arrays: Any, tokens: int, settings: Settings) -> list[Row]:
    """Return a row for each contestant, timed in turn.

    A peer that has memory of its own, and leaves too little for the others, is measured before them and ended: JAX
    never gives memory back to the driver, so it cannot come after them.

    Args:
        contestants: contestants that have not begun; a peer comes first.
        arrays: second argument of every step.
        tokens: number of tokens of a step.
        settings: settings of the measurement.
    """
    try:
        for contestant in contestants:
            contestant.launch()
        for contestant in reversed(contestants):  # the peer comes first, and its processes import meanwhile
            contestant.begin()
        for group in _groups(contestants):
            _measure(group, arrays, settings)
            for contestant in group:
                contestant.close()
        return rows_of(contestants, tokens)
    finally:
        for contestant in contestants:
            contestant.close()


def _groups(contestants: Sequence[Contestant]) -> list[Sequence[Contestant]]:
    """Return the contestants that are measured in turn, one group after another: all, or the peer and then the rest."""
    peer, *own = contestants
    needed = _ALLOCATED * max((each.memory.get("peak_gib", 0.0) * GIB for each in own), default=0.0)
    if peer.free_bytes is None or needed <= peer.free_bytes:
        return [contestants]
    free, needed = peer.free_bytes / GIB, needed / GIB
    print(
        f"{peer.name} leaves {free:.1f} GiB of a GPU, and jax_te may take {needed:.1f}: measured one after the other",
        file=sys.stderr,
        flush=True,
    )
    return [[peer], own]


def _measure(contestants: Sequence[Contestant], arrays: Any, settings: Settings) -> None:
    for contestant in reversed(contestants):
        contestant.start(arrays, settings.calls)
    for _ in range(settings.rounds):
        for contestant in contestants:
            contestant.round(arrays, settings.calls)
    for contestant in contestants:
        # Another process would have a profiler of its own.
        if settings.profile is not None and isinstance(contestant, CompiledStep):
            contestant.trace(arrays, settings.profile)


def rows_of(contestants: Sequence[Contestant], tokens: int) -> list[Row]:
    """Return a row for each contestant, with its ratios to the first that ran if there are several.

    Args:
        contestants: contestants after their rounds.
        tokens: number of tokens in a step.
    """
    first = next((contestant for contestant in contestants if contestant.error is None), None)
    rows = []
    for contestant in contestants:
        row: dict[str, Any] = {"name": contestant.name}
        if contestant.error is None and first is not None:
            peer, median = statistics.median(first.seconds), statistics.median(contestant.seconds)
            row |= {
                "ms": round(1e3 * median, 3),
                "spread_ms": round(1e3 * (max(contestant.seconds) - min(contestant.seconds)), 3),
                "tokens_s": round(tokens / median),
            }
            if len(contestants) > 1:  # a single contestant has no ratio
                row["speed_ratio"] = round(peer / median, 3)
        row |= contestant.memory
        if len(contestants) > 1 and first is not None and "peak_gib" in row and first.memory.get("peak_gib"):
            row["memory_ratio"] = round(row["peak_gib"] / first.memory["peak_gib"], 3)
        if contestant.times is not None:
            row["kinds"] = {kind: round(ms, 3) for kind, ms in contestant.times.kinds.items()}
        if contestant.compile_s is not None:
            row["compile_s"] = round(contestant.compile_s, 1)
        if contestant.error is not None:
            row["error"] = contestant.error
        rows.append(row)
    return rows
