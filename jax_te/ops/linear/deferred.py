"""Deferred kernel gradients: backward returns the operands of their GEMM, which `deferred_wgrad` multiplies later."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.ops.linear import gemms
from jax_te.ops.linear.spec import LinearSpec
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.quantize import OpaqueTree
from jax_te.sharding import ranks_of, reshard
from jax_te.typing import Array


def deferred_sink(spec: LinearSpec, operands: OpaqueTree, lead: tuple[int, ...]) -> OpaqueTree:
    """Return a ``grad_sink`` whose cotangent is the operands of a kernel gradient: zeros, which nothing reads.

    Args:
        spec: the layer, as its `jax_te.ops.linear.spec.Probe` saw it.
        operands: shapes and dtypes that the probe saw, on a mesh those of one device.
        lead: axes in front, of a kernel that a loop over layers takes slices of.
    """
    mesh, axes = spec.plan.mesh, spec.plan.device_axes

    def zeros(seen: Any) -> Array:
        if mesh is None:
            return jnp.zeros((*lead, *seen.shape), seen.dtype)
        array = jnp.zeros((*lead, ranks_of(axes, mesh)[1], *seen.shape[1:]), seen.dtype)
        # A cotangent has its primal's sharding, and on Explicit axes that is part of its type.
        return reshard(array, PartitionSpec(*[None] * len(lead), axes), mesh)

    return jax.tree.map(zeros, operands)


def deferred_wgrad(spec: LinearSpec, operands: OpaqueTree, lead: tuple[int, ...]) -> Array:
    """Return the kernel's gradient ``[*lead, k, *n]`` from the cotangent of its `deferred_sink`.

    For a layer with a `jax_te.ops.linear.spec.Summands` sink these are the summands, ``[*lead, d, k, *n]``.

    It is nan if the sink was read more than once, as by a layer that a loop repeats, because JAX has then summed
    operands.
    """
    assert spec.sink is not None
    shards = spec.plan.shards(spec.plan.per_device, spec.sink.spec(spec.plan))
    multiply: Any = functools.partial(_wgrad, spec, shards, out_axes=spec.options.kernel_axes)
    for _ in lead:
        multiply = functools.partial(jax.lax.map, multiply)
    return multiply(operands)


def _fwd(spec: LinearSpec, args: OpaqueTree) -> tuple[Array, None]:
    x, g, uses = args.unpack()
    # `jax_te.training.deferred_vjp` gives such layers no sink; this is for uses that it cannot see in a jaxpr. Compared
    # with 1 from above: a frozen layer's sink is not read at all.
    return jnp.where(uses <= 1.0, gemms.wgrad(spec, x, g), jnp.nan), None


def _bwd(spec: LinearSpec, residuals: None, g: Array) -> Any:
    raise TypeError("a deferred kernel gradient cannot be differentiated again")


_wgrad = sharded_vjp(_fwd, _bwd)
