"""Context parallelism in the arguments of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flax import nnx

from jax_te.layers.mode import TrainingMode

CONTEXT_AXIS = "context"
"""Mesh axis that takes the place of Transformer Engine's context-parallel process group."""


def check_cp_group(cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None) -> None:
    """Raise TypeError unless ``cp_group`` is None or the mesh's axis ``"context"``, and the other arguments are None.

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


class ContextParallelModule(TrainingMode):
    """Base of layers that contain attention."""

    def set_context_parallel_group(
        self,
        cp_group: str | None,
        cp_global_ranks: None = None,
        cp_stream: None = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Choose how the devices along the mesh's context axis exchange keys and values, in all attention of the layer.

        Args:
            cp_group: None or ``"context"``, which both leave the devices to the mesh.
            cp_global_ranks: None: the order is that of the mesh's devices.
            cp_stream: None: XLA orders exchange and computation by itself.
            cp_comm_type: see the class.

        Raises:
            TypeError: for a process group, ranks or a CUDA stream.
            ValueError: for an unknown type.

        >>> from jax_te.layers import DotProductAttention
        >>> core = DotProductAttention(4, 16)
        >>> core.set_context_parallel_group("context", cp_comm_type="all_gather")
        >>> core.context_parallel.cp_comm_type
        'all_gather'
        """
        # Before the first change, so that a refused call leaves all cores as they were.
        check_cp_group(cp_group, cp_global_ranks, cp_stream)
        layer: Any
        for _, layer in nnx.iter_modules(self):
            # By attribute, not by class, so that a custom core in place of `DotProductAttention` is found, too.
            if hasattr(layer, "context_parallel"):
                layer.context_parallel = replace(layer.context_parallel, cp_comm_type=cp_comm_type)
