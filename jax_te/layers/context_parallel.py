"""Context parallelism as layers are asked for it."""

from __future__ import annotations

from typing import Any

from flax import nnx

CONTEXT_AXIS = "context"
"""The mesh axis that stands for Transformer Engine's context-parallel process group."""


def check_cp_group(cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None) -> None:
    """Raise TypeError unless ``cp_group`` is None or the mesh's axis ``"context"``, and the others are None.

    >>> check_cp_group("context")
    """
    if cp_group is not None and cp_group != CONTEXT_AXIS:
        raise TypeError(
            f"cp_group must be None or the mesh axis {CONTEXT_AXIS!r}, got {cp_group!r}: JAX has no process groups. "
            "jax.set_mesh(make_mesh(ParallelConfig(context=...))) says which devices split a sequence"
        )
    if cp_global_ranks is not None:
        raise TypeError(
            f"cp_global_ranks must be None, got {cp_global_ranks!r}: the order of devices along the mesh's context "
            "axis is that of the ranks; make_mesh(..., devices=...) takes another one"
        )
    if cp_stream is not None:
        raise TypeError(
            f"cp_stream must be None, got {cp_stream!r}: there are no streams in JAX, XLA overlaps exchange and "
            "computation by itself"
        )


def set_context_parallel_group(
    module: nnx.Module, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str
) -> None:
    """Call the method of that name of every attention core inside of ``module``."""
    check_cp_group(cp_group, cp_global_ranks, cp_stream)
    layer: Any
    for _, layer in nnx.iter_modules(module):
        if layer is not module and hasattr(layer, "context_parallel"):
            layer.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
