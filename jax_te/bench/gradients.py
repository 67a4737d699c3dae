"""Compiled forward-and-backward passes that are measured in turn, on the same arrays at every call."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.bench.compiling import compile_and_time
from jax_te.bench.settings import GIB, Row, Settings
from jax_te.bench.traces import traced
from jax_te.metrics import KernelTimes
from jax_te.typing import Array

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass
class Gradient:
    """The compiled gradients of ``sum(fn(*args) * dy)`` with respect to ``args``, and its measurements."""

    name: str
    run: Callable[[], Any]
    temp_gib: float
    compile_s: float
    hlo: str
    seconds: list[float] = field(default_factory=list)
    times: KernelTimes | None = None

    def row(self, flops: float, devices: int) -> Row:
        """Return its row: median time, rate and memory of a device.

        Args:
            flops: floating-point operations of a call, over all devices.
            devices: number of devices that it runs on.
        """
        median = statistics.median(self.seconds)
        row: Row = {
            "name": self.name,
            "ms": round(median * 1e3, 3),
            "spread_ms": round((max(self.seconds) - min(self.seconds)) * 1e3, 3),
            "tflops": float(f"{flops / median / 1e12 / devices:.4g}"),  # of a CPU, too
            "temp_gib": round(self.temp_gib, 3),
            "compile_s": round(self.compile_s, 1),
        }
        if devices > 1:
            row["collectives"] = dict(Counter(COLLECTIVES.findall(self.hlo)))
        if self.times is not None:
            row["kinds"] = {kind: round(ms, 3) for kind, ms in self.times.kinds.items()}
        return row

    def calls(self, number: int) -> None:
        """Make so many calls, and return when they are done."""
        result = None
        for _ in range(number):
            result = self.run()
        jax.block_until_ready(result)


def gradient(name: str, fn: Callable[..., Array], args: Sequence[Any], dy: Array, shardings: Any = None) -> Gradient:
    """Return the compiled gradient of ``sum(fn(*args) * dy)``.

    Args:
        name: name of the row.
        fn: function that returns an array of ``dy``'s shape.
        args: arguments of ``fn``: arrays and trees of arrays, all of which are differentiated.
        dy: random numbers, since the compiler could fold a gradient of ones.
        shardings: shardings of the gradients. None: the compiler's choice.
    """

    # A list of arrays, because a call takes trees apart and builds those of its results: of an nnx.State that is Python
    # code, 5 us an array, where a layer may take 200 us.
    leaves, tree = jax.tree.flatten(tuple(args))

    def loss(leaves: list[Any], dy: Array) -> Array:
        y = fn(*jax.tree.unflatten(tree, leaves))
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

    grad = jax.jit(jax.grad(loss, allow_int=True), out_shardings=shardings and jax.tree.leaves(shardings))
    compiled, seconds = compile_and_time(lambda: grad.lower(leaves, dy))
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes / GIB if memory is not None else math.nan
    return Gradient(name, lambda: compiled(leaves, dy), temp, seconds, compiled.as_text() or "")


def measure(gradients: Sequence[Gradient], settings: Settings) -> None:
    """Time them in turn, so that a GPU that heats up slows all of them alike; trace them afterwards, if requested."""
    for gradient in gradients:
        gradient.calls(1)  # a first call loads the program, which is not measured
    for _ in range(settings.rounds):
        for gradient in gradients:
            start = time.perf_counter()
            gradient.calls(settings.calls)
            gradient.seconds.append((time.perf_counter() - start) / settings.calls)
    if settings.profile is not None:
        for gradient in gradients:
            gradient.times = traced(gradient.name, gradient.calls, settings.profile)
