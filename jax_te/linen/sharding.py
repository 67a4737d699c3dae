"""Sharding rules in Flax's form."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jax_te.sharding import ShardingRules, logical_to_spec


def logical_axis_rules(
    mesh: Mesh | AbstractMesh, rules: ShardingRules | None = None
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Return `jax_te.sharding.ShardingRules` in the form of ``nn.logical_to_mesh_sharding`` and its kin.

    Add pairs for logical axes of your own, such as the axis that ``nn.scan`` adds.

    Args:
        mesh: mesh axes that the rules name and the mesh lacks are left out.
        rules: None for the ambient rules.

    >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    >>> dict(logical_axis_rules(mesh))["ffn"], dict(logical_axis_rules(mesh))["fsdp"]
    ('tensor', None)
    """
    return tuple((name, logical_to_spec((name,), mesh, rules)[0]) for name in ShardingRules.names())
