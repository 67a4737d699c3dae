"""Meshes, logical axes, where arrays live on a mesh, and code that runs on each device of it."""

from jax_te.sharding.communication import CommunicationReport, communication_report
from jax_te.sharding.constrain import auto_region, constrain
from jax_te.sharding.mesh import make_mesh
from jax_te.sharding.network import CollectiveCount, Network
from jax_te.sharding.placement import shardings_of
from jax_te.sharding.report import ArrayPlacement, ShardingReport, sharding_report
from jax_te.sharding.rules import ShardingRules, current_mesh, logical_to_spec, named_sharding, use_rules

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
