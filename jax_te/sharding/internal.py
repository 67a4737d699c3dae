"""Names of `jax_te.sharding` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.sharding.collectives import REPLICATED, all_gather, device_mesh, reduce_max, reduce_sum, reshard
from jax_te.sharding.placement import (
    check_divides,
    create_sharded,
    leaves_with_axes,
    log_whole_parameters,
    variable_axes,
)
from jax_te.sharding.rules import (
    Dims,
    MeshAxes,
    activation_axis,
    axis_ranks,
    batch_ranks,
    current_rules,
    flat,
    gathered_axes,
    local_shape,
    mesh_dims,
    partition_spec,
    ranks_of,
    row_axis,
    whole_sequences,
)

__all__ = [
    "REPLICATED",
    "Dims",
    "MeshAxes",
    "activation_axis",
    "all_gather",
    "axis_ranks",
    "batch_ranks",
    "check_divides",
    "create_sharded",
    "current_rules",
    "device_mesh",
    "flat",
    "gathered_axes",
    "leaves_with_axes",
    "local_shape",
    "log_whole_parameters",
    "mesh_dims",
    "partition_spec",
    "ranks_of",
    "reduce_max",
    "reduce_sum",
    "reshard",
    "row_axis",
    "variable_axes",
    "whole_sequences",
]
