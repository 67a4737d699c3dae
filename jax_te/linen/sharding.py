"""Sharding rules in Flax's form."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jax_te.sharding import ShardingRules, logical_to_spec


def logical_axis_rules(
    mesh: Mesh | AbstractMesh, rules: ShardingRules | None = None
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """`jax_te.sharding.ShardingRules` as rules for ``nn.logical_to_mesh_sharding`` and ``nn.logical_axis_rules``.

    Add pairs for logical axes of your own, such as the one that ``nn.scan`` adds.

    Args:
        mesh: mesh axes that it lacks are left out.
        rules: None for the ambient rules.

    >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    >>> dict(logical_axis_rules(mesh))["ffn"], dict(logical_axis_rules(mesh))["fsdp"]
    ('tensor', None)
    """
    return tuple((name, logical_to_spec((name,), mesh, rules)[0]) for name in ShardingRules.names())
