"""Meshes, logical axes and sharding constraints."""

from jax_te.parallel.mesh import make_mesh
from jax_te.parallel.sharding import (
    ShardingRules,
    auto_region,
    axis_ranks,
    batch_ranks,
    constrain,
    current_mesh,
    logical_to_spec,
    named_sharding,
    use_rules,
)
from jax_te.parallel.split_backward import split_vjp

__all__ = [
    "ShardingRules",
    "auto_region",
    "axis_ranks",
    "batch_ranks",
    "constrain",
    "current_mesh",
    "logical_to_spec",
    "make_mesh",
    "named_sharding",
    "split_vjp",
    "use_rules",
]
