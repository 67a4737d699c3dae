"""Meshes, logical axes, placement of arrays on a mesh, and code that runs on each of its devices."""

from jax_te.sharding.collectives import (
    REPLICATED,
    all_gather,
    all_to_all,
    device_mesh,
    mark_varying,
    moved,
    reduce_max,
    reduce_sum,
    reshard,
    varying_axes,
)
from jax_te.sharding.communication import CommunicationReport, communication_report, without_compile_cache
from jax_te.sharding.constrain import auto_region, constrain
from jax_te.sharding.mesh import make_mesh
from jax_te.sharding.network import CollectiveCount, Network
from jax_te.sharding.placement import (
    check_divides,
    create_sharded,
    leaves_with_axes,
    log_whole_parameters,
    shardings_of,
    variable_axes,
)
from jax_te.sharding.report import ArrayPlacement, ShardingReport, sharding_report
from jax_te.sharding.rules import (
    Dims,
    MeshAxes,
    ShardingRules,
    activation_axis,
    axis_ranks,
    batch_axes,
    batch_ranks,
    current_mesh,
    current_rules,
    entry_axes,
    entry_of,
    flat,
    free_axes,
    gathered_axes,
    indivisible_reason,
    known_names,
    leading_axes,
    local_shape,
    logical_to_spec,
    mesh_dims,
    named_sharding,
    partition_spec,
    ranks_of,
    replica_axes,
    row_axis,
    summed_axes,
    use_rules,
    whole_sequences,
)

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "ArrayPlacement",
    "CollectiveCount",
    "CommunicationReport",
    "Network",
    "ShardingReport",
    "ShardingRules",
    "auto_region",
    "communication_report",
    "constrain",
    "current_mesh",
    "logical_to_spec",
    "make_mesh",
    "named_sharding",
    "sharding_report",
    "shardings_of",
    "use_rules",
]
