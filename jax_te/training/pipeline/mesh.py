"""The mesh's pipeline axis, and the sharding rules of arrays that belong to one of its stages."""

from __future__ import annotations

import dataclasses

from jax_te.sharding import ShardingRules, current_mesh, current_rules

PIPELINE_AXIS = "pipeline"


def pipeline_stages() -> int:
    """Return the number of devices along the mesh's pipeline axis; 1 without one."""
    mesh = current_mesh()
    return 1 if mesh is None else mesh.shape.get(PIPELINE_AXIS, 1)


def stage_rules() -> ShardingRules:
    """Return the rules in use without the pipeline axis, for arrays that belong to one stage."""
    rules = current_rules()
    names = [rule.name for rule in dataclasses.fields(ShardingRules)]
    without = {name: tuple(axis for axis in getattr(rules, name) if axis != PIPELINE_AXIS) for name in names}
    return dataclasses.replace(rules, **without)
