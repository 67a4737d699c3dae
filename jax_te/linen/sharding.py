"""Sharding rules in Flax's format."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from jax.sharding import AbstractMesh, Mesh

from jax_te._validation import checked, log_once
from jax_te.sharding import ShardingRules, current_mesh, logical_to_spec

FlaxRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@checked
def logical_axis_rules(mesh: Mesh | AbstractMesh, rules: ShardingRules | None = None) -> FlaxRules:
    """Return `jax_te.sharding.ShardingRules` in the format of ``nn.logical_to_mesh_sharding`` and related functions.

    Behind them are the rules that are set in Flax (``nn.logical_axis_rules``) for other names. Add pairs for logical
    axes of your own, such as the axis that ``nn.scan`` adds.

    Args:
        mesh: mesh axes that the rules name and the mesh lacks are left out.
        rules: None for the ambient rules.

    Raises:
        ValueError: for a rule that is set both in the ambient rules and in Flax, and differs.

    >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    >>> dict(logical_axis_rules(mesh))["ffn"], dict(logical_axis_rules(mesh))["fsdp"]
    ('tensor', None)
    >>> with nn.logical_axis_rules([("experts", "data")]):
    ...     logical_axis_rules(mesh)[-1]
    ('experts', 'data')
    """
    names = ShardingRules.names()
    others = tuple(pair for pair in nn.get_logical_axis_rules() if pair[0] not in names)
    return (*((name, logical_to_spec((name,), mesh, rules)[0]) for name in names), *others)


def unbox(variables: Any) -> Any:
    """Return the values of boxed variables, split over the mesh in use if rules are set in Flax."""
    mesh, rules = current_mesh(), nn.get_logical_axis_rules()
    if mesh is None or not rules:
        return meta.unbox(variables)
    both = logical_axis_rules(mesh)
    known, boxes = dict(rules), jax.tree.leaves(variables, is_leaf=is_box)
    used = {name for box in boxes if is_box(box) for name in box.names}
    missing = [name for name, axes in both if axes is not None and name in used and name not in known]
    if missing:
        log_once(
            f"Flax's logical_axis_rules do not name {', '.join(missing)}, so that nn.logical_to_mesh_sharding leaves "
            "kernels of jax_te.linen whole on every device; give it jax_te.linen.logical_axis_rules(mesh), which has "
            "both"
        )
    # Under Flax's rules alone it would make whole what they do not name.
    with nn.logical_axis_rules(both):
        return meta.unbox(variables)


def is_box(node: Any) -> bool:
    """Return whether a node of variables is an array with names of its axes, ``nn.Partitioned``."""
    return isinstance(node, nn.Partitioned)
