"""The time that a program takes to compile."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from jax_te.sharding import without_compile_cache


def compile_and_time(lower: Callable[[], jax.stages.Lowered]) -> tuple[jax.stages.Compiled, float]:
    """Return a program and the seconds to trace, lower and compile it, also where a cache on disk holds it."""
    with without_compile_cache():
        start = time.perf_counter()
        compiled = lower().compile()
        return compiled, time.perf_counter() - start
