"""Meshes, logical axes and sharding constraints."""

from jax_te.parallel.mesh import make_mesh
from jax_te.parallel.placement import check_divides, create_sharded, leaves_with_axes, shardings_of
from jax_te.parallel.recompute import CHECKPOINT_NAMES, POLICIES, RecomputePolicy, checkpoint, recompute_policy
from jax_te.parallel.report import ArrayPlacement, ShardingReport, sharding_report
from jax_te.parallel.rng import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    MODEL_PARALLEL_RNG,
    RNGStatesTracker,
    StreamState,
    model_parallel_seed,
    model_parallel_seeds,
)
from jax_te.parallel.selective import recomputed, run_recomputed, selective_recompute
from jax_te.parallel.sharding import (
    ShardingRules,
    activation_axis,
    auto_region,
    axis_ranks,
    batch_ranks,
    constrain,
    current_mesh,
    logical_to_spec,
    named_sharding,
    ranks_of,
    row_axis,
    use_rules,
    whole_sequences,
)
from jax_te.parallel.split_backward import split_vjp

__all__ = [
    "CHECKPOINT_NAMES",
    "DATA_PARALLEL_RNG",
    "EXPERT_PARALLEL_RNG",
    "MODEL_PARALLEL_RNG",
    "POLICIES",
    "ArrayPlacement",
    "RNGStatesTracker",
    "RecomputePolicy",
    "ShardingReport",
    "ShardingRules",
    "StreamState",
    "activation_axis",
    "auto_region",
    "axis_ranks",
    "batch_ranks",
    "check_divides",
    "checkpoint",
    "constrain",
    "create_sharded",
    "current_mesh",
    "leaves_with_axes",
    "logical_to_spec",
    "make_mesh",
    "model_parallel_seed",
    "model_parallel_seeds",
    "named_sharding",
    "ranks_of",
    "recompute_policy",
    "recomputed",
    "row_axis",
    "run_recomputed",
    "selective_recompute",
    "sharding_report",
    "shardings_of",
    "split_vjp",
    "use_rules",
    "whole_sequences",
]
