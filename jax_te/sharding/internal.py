"""Names of `jax_te.sharding` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.sharding.placement import create_sharded, leaves_with_axes
from jax_te.sharding.rules import (
    activation_axis,
    axis_ranks,
    batch_ranks,
    ranks_of,
    row_axis,
    whole_sequences,
)
from jax_te.sharding.shards import (
    PER_RANK,
    WHOLE,
    Layout,
    MeshAxes,
    RankTree,
    gather,
    layout_of,
    on_ranks,
    place,
    rank_mesh,
    reduce_max,
    reduce_sum,
)

__all__ = [
    "PER_RANK",
    "WHOLE",
    "Layout",
    "MeshAxes",
    "RankTree",
    "activation_axis",
    "axis_ranks",
    "batch_ranks",
    "create_sharded",
    "gather",
    "layout_of",
    "leaves_with_axes",
    "on_ranks",
    "place",
    "rank_mesh",
    "ranks_of",
    "reduce_max",
    "reduce_sum",
    "row_axis",
    "whole_sequences",
]
