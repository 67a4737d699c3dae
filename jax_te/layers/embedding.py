"""Embedding tables of tokens and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from jax_te._validation import check_positive, checked
from jax_te.config import normal_init
from jax_te.layers.parameters import parameter
from jax_te.ops import as_int32, look_up_rows
from jax_te.sharding import auto_region, constrain, device_mesh, flat, free_axes, mesh_dims, partition_spec
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
        rngs: the ``params`` stream draws the table.

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
                return _look_up_on_devices(table, ids, (self.axes[0], None), ids_axes, mesh)
            return constrain(look_up_rows(table, ids), out_axes)

        with jax.named_scope("Embedding"):
            return auto_region(look_up, out_axes)(self.embedding[...], ids)


def _look_up_on_devices(
    table: Array, ids: Array, axes: LogicalAxes, ids_axes: LogicalAxes, mesh: AbstractMesh
) -> Array:
    """Return rows of a table whose vocabulary is split: each device's own rows, summed over devices."""
    # XLA's partitioner aborts the process on a lookup with a sharded table and sharded ids inside a shard_map over
    # another axis of the mesh (jax 0.10 to 0.12, CPU).
    table_dims, ids_dims = mesh_dims(axes, mesh), mesh_dims(ids_axes, mesh)
    over = flat(table_dims)

    def look_up(table: Array, ids: Array) -> Array:
        rows = table.shape[0]
        own = ids - (jax.lax.axis_index(over) * rows if over else 0)
        inside = (own >= 0) & (own < rows)
        found = look_up_rows(table, jnp.where(inside, own, 0))
        found = jnp.where(inside[..., None], found, jnp.zeros((), table.dtype))
        # Only one summand is nonzero, so the sum is exact. An id outside of the whole table is in no shard.
        count = inside.astype(jnp.int32)
        count, found = jax.lax.psum((count, found), over) if over else (count, found)
        return jnp.where((count > 0)[..., None], found, jnp.asarray(jnp.nan, found.dtype))

    out = partition_spec((*ids_dims, ()))
    specs = partition_spec(table_dims), partition_spec(ids_dims)
    return jax.shard_map(
        look_up, mesh=mesh, in_specs=specs, out_specs=out, axis_names=set(free_axes(mesh)), check_vma=False
    )(table, ids)
