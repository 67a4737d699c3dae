"""Embedding tables of tokens and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import normal_init
from jax_te.layers.parameters import parameter
from jax_te.ops import as_int32, look_up_rows, look_up_rows_on_devices
from jax_te.sharding import auto_region, constrain, device_mesh
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes


@checked
class Embedding(nnx.Module):
    """Table ``[v, h]`` whose rows are looked up by integer ids.

    Args:
        num_embeddings: ``v``.
        hidden_size: ``h``.
        init_method: initializer of the table. None: N(0, 0.023²).
        params_dtype: dtype of ``embedding [v, h]``.
        axes: logical axes of the table. The default splits the vocabulary over the mesh's tensor axis; ``(None,
            "fsdp")`` suits positions.
        rngs: random streams, of which ``params`` draws the table.

    Raises:
        ValueError: for a size that is not positive or an unknown dtype.
        TypeError: when called, for ids that are not integers.

    Source: ``megatron.core.tensor_parallel.VocabParallelEmbedding``.

    >>> Embedding(100, 16, rngs=nnx.Rngs(0))(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        num_embeddings: int,
        hidden_size: int,
        *,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        axes: LogicalAxes = ("vocab", "fsdp"),
        rngs: nnx.Rngs,
    ):
        check_positive(num_embeddings=num_embeddings, hidden_size=hidden_size)
        init = normal_init() if init_method is None else init_method
        self.embedding = parameter(init, rngs, (num_embeddings, hidden_size), params_dtype, axes)
        self.axes = axes

    def __call__(self, ids: Array, *, ids_axes: LogicalAxes = ("batch", "sequence")) -> Array:
        """Look up rows.

        Args:
            ids: integers ``[...]`` in ``[0, v)``. The row of any other id is nan.
            ids_axes: logical axes of ``ids``.

        Returns:
            ``[..., h]`` in the table's dtype, with the axes of ``ids`` and then ``hidden``.
        """
        ids = as_int32("ids", ids)
        out_axes = (*ids_axes, "hidden")

        def look_up(table: Array, ids: Array) -> Array:
            # All-gather the table over the fsdp devices first, as any kernel: the lookup in a table split along its
            # hidden axis would give activations split so. The gradient is reduce-scattered.
            table = constrain(table, (self.axes[0], "hidden"))
            mesh = device_mesh()
            if mesh is not None and mesh.manual_axes:
                # XLA's partitioner aborts the process on a lookup with a sharded table and sharded ids inside of a
                # shard_map over another axis of the mesh (jax 0.10 to 0.12, CPU).
                return look_up_rows_on_devices(table, ids, (self.axes[0], None), ids_axes, mesh)
            return constrain(look_up_rows(table, ids), out_axes)

        with jax.named_scope("Embedding"):
            return auto_region(look_up, out_axes)(self.embedding[...], ids)
