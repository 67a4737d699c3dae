"""MLIR contexts that several lowerings share: a newer jax shares them itself, and jax 0.10.2 makes one for each."""

from __future__ import annotations

import threading
from typing import Any

from jax._src.interpreters import mlir

_USES = 100  # a context keeps every type, attribute and location that it has met


def share_contexts() -> None:
    """Let each context serve up to a hundred lowerings of one thread.

    A context loads every dialect, which takes about 3 ms, and most of the tests' programs are lowered in less.
    """
    make, local = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        if getattr(local, "uses", _USES) == _USES:
            local.context, local.uses = make(), 0
        local.uses += 1
        return local.context

    mlir.make_ir_context = shared
