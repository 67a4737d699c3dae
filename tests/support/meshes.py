"""The kinds of mesh that everything must give the same result on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.layers import parameter_axes
from jax_te.sharding import make_mesh, named_sharding

MODES = ("no mesh", "auto", "explicit")


@contextlib.contextmanager
def use_mesh(mode: Any) -> Iterator[None]:
    """No mesh, or ``data=2, fsdp=2, tensor=2`` set as an Auto or an Explicit mesh."""
    if mode == "no mesh":
        yield
    else:
        with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type=mode)):
            yield


def shardings(model: nnx.Module) -> Any:
    """Shardings of a model's parameters on the mesh that is set, by their logical axes."""
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(
        lambda axes: named_sharding(axes, mesh), parameter_axes(model), is_leaf=lambda node: isinstance(node, tuple)
    )


def shard(model: Any) -> Any:
    """The model with its parameters split over the mesh that is set, if any."""
    if not jax.sharding.get_mesh().empty:
        nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), shardings(model)))
    return model
