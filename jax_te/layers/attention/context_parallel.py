"""Context parallelism in the arguments of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from flax import nnx

from jax_te._validation import checked
from jax_te.layers.attention.core import is_core
from jax_te.layers.mode import TrainingMode
from jax_te.typing import Words

CONTEXT_AXIS = "context"
"""Mesh axis that takes the place of Transformer Engine's context-parallel process group."""

ContextGroup = Annotated[
    str | None,
    Words(
        f"None or the mesh axis {CONTEXT_AXIS!r}",
        "JAX has no process groups: jax.set_mesh(make_mesh(ParallelConfig(context=...))) says which devices split a "
        "sequence",
        holds=lambda group: group is None or (isinstance(group, str) and group == CONTEXT_AXIS),
    ),
]
NoRanks = Annotated[
    None,
    Words(
        "None",
        "the order of devices along the mesh's context axis is that of the ranks; make_mesh(..., devices=...) takes "
        "another one",
    ),
]
NoStream = Annotated[
    None, Words("None", "there are no streams in JAX, XLA overlaps exchange and computation by itself")
]


class ContextParallelModule(TrainingMode):
    """Base of layers that contain attention."""

    @checked
    def set_context_parallel_group(
        self,
        cp_group: ContextGroup,
        cp_global_ranks: NoRanks = None,
        cp_stream: NoStream = None,
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
        cores: list[Any] = [layer for _, layer in nnx.iter_modules(self) if is_core(layer)]
        # All are made before one is set: an exchange that one core refuses leaves all as they were.
        chosen = [replace(core.context_parallel, cp_comm_type=cp_comm_type) for core in cores]
        for core, context_parallel in zip(cores, chosen, strict=True):
            core.context_parallel = context_parallel
