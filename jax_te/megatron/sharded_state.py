"""Description of a module's checkpoint: the target of a restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jax_te._validation import checked
from jax_te.megatron.state_dict import arrays_of, state_dict, variables_of
from jax_te.sharding import named_sharding, variable_axes


@checked
def sharded_state_dict(
    module: nnx.Module,
    prefix: str = "",
    sharded_offsets: Sequence[Any] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of every array of a module, under the names of its `state_dict`.

    Arrays are global, so a description needs no rank offsets, no replica ids and no choice of a writer. Parameters are
    sharded by their logical axes, everything else (quantizer state, random keys, statistics) is replicated. The dict is
    a target for `jax_te.checkpoint.TrainCheckpointer.restore` and for Orbax, on any mesh, whatever mesh the checkpoint
    was saved from; `load_state_dict` loads the restored arrays into the module.

    A submodule's own method ``sharded_state_dict``, if it has one, gives its part of the dict.

    Args:
        module: module, whose arrays may be abstract (``nnx.eval_shape``).
        prefix: prefix of every name, with its dot.
        sharded_offsets: ``()``.
        metadata: metadata passed on to submodules. Megatron's has process groups and formats, which have no effect
            here.

    Returns:
        Descriptions by name, with ``NamedSharding`` on the mesh of ``jax.set_mesh``; without a mesh, the sharding is
        None.

    Raises:
        ValueError: for ``sharded_offsets`` that are not empty.

    Source: ``megatron.core.transformer.module.MegatronModule.sharded_state_dict``.

    >>> sharded_state_dict(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "fc1.")["fc1.kernel"]
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    if len(sharded_offsets):
        raise ValueError(
            f"sharded_offsets must be (), got {sharded_offsets!r}: arrays are global, so a parent has no offsets to "
            "hand down; layers of a pipeline stage keep their own names"
        )
    # The mesh in use, not the arrays': the dict describes where a restore will put them.
    mesh = jax.sharding.get_mesh()
    described: dict[str, jax.ShapeDtypeStruct] = {}
    for key, variable, layout in variables_of(module):
        for name, leaf in arrays_of(prefix + key, variable, layout, abstract=True).items():
            axes = layout.axes if layout is not None else variable_axes(variable, leaf)
            sharding = None if mesh.empty else named_sharding(axes, mesh)
            described[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    own = set(described)
    for path, child in _self_describing(module):
        # The child may name its arrays differently, so its default names go first.
        part = f"{prefix}{'.'.join(map(str, path))}."
        described = {name: leaf for name, leaf in described.items() if not name.startswith(part)}
        # A parameter shared with an earlier module has that module's name, as in `state_dict`.
        tied = state_dict(child, part).keys() - own
        given = child.sharded_state_dict(part, sharded_offsets, metadata)
        described |= {name: leaf for name, leaf in given.items() if name not in tied}
    return described


def _self_describing(module: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the outermost submodules that have a ``sharded_state_dict`` other than the function of this file."""
    found = {path: child for path, child in nnx.iter_modules(module) if path and _describes_itself(child)}
    return [
        (path, child) for path, child in found.items() if not any(path[:size] in found for size in range(1, len(path)))
    ]


def _describes_itself(module: Any) -> bool:
    method = getattr(module, "sharded_state_dict", None)
    return method is not None and getattr(method, "__func__", method) is not sharded_state_dict
