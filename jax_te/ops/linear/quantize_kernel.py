"""Quantization of a kernel before the calls that use it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te._validation import check_axes, checked
from jax_te.ops.backend import ambient_backend, backend_for
from jax_te.ops.linear.resolve import usable_weights
from jax_te.ops.linear.spec import LinearWeights
from jax_te.ops.overflow import show_overflow
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.ops.xla import grouped as xla_grouped
from jax_te.quantize import (
    GemmState,
    Guard,
    OpaqueTree,
    Quantization,
    QuantizedKernel,
    Quantizer,
    TensorQuantizer,
    ambient_observer,
    as_float32,
    precision_of,
    quantize_operand,
)
from jax_te.recipe import Recipe
from jax_te.sharding import (
    auto_region,
    current_mesh,
    device_mesh,
    free_axes,
    gathered_axes,
    local_shape,
    logical_to_spec,
    mesh_dims,
    reduce_max,
)
from jax_te.typing import Array, BackendName, LogicalAxes


@checked
def quantize_kernel(
    kernel: Array,
    *,
    recipe: Recipe,
    state: GemmState | None = None,
    kernel_axes: LogicalAxes | None = None,
    portable: bool = False,
    grouped: bool = False,
    on_devices: bool = False,
    backend: BackendName | None = None,
) -> QuantizedKernel:
    """Return a kernel in the form that the GEMMs read, for several calls with the same values.

    A call with it gives the bits that a call with the kernel itself gives, unless the recipe keeps one of the kernel's
    GEMMs in high precision: then that one reads the quantized values, too. It is not a differentiable function of the
    kernel: give the call a ``grad_sink`` (see `dense`).

    Args:
        kernel: ``[k, *n]``, or ``[e, k, *n]`` if ``grouped``, in any float dtype.
        recipe: the recipe of the calls.
        state: the recipe's state, if it has any.
        kernel_axes: logical axes of the kernel; required on a mesh with Explicit axes.
        portable: whether to make it of plain arrays, which any backend reads and a checkpoint holds, instead of the
            form that this backend reads fastest.
        grouped: whether there are several kernels for `grouped_dense`, each quantized by itself.
        on_devices: whether the calls of `grouped_dense` have rows that are placed on a mesh (`RowGroups`).
        backend: backend of the calls; None for the ambient one.

    Raises:
        ValueError: if the recipe does not quantize kernels.
        QuantizerStateError: if the recipe has state and none is given.

    >>> import jax.numpy as jnp
    >>> from jax_te.ops import dense
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> quantized = quantize_kernel(jnp.ones((32, 16)), recipe=Float8CurrentScaling())
    >>> dense(jnp.ones((16, 32)), quantized, recipe=Float8CurrentScaling()).shape
    (16, 16)
    """
    check_axes("kernel", kernel, 2)
    # Rounding to FP8 has no useful derivative; the calls that read the result return the kernel's gradient.
    kernel, state = jax.lax.stop_gradient((kernel, state))
    precision = precision_of(recipe)
    usable_weights(LinearWeights(kernel, state=state), precision, recipe)  # raises for a missing state
    if (quantizer := precision.kernel.quantizer) is None:
        raise ValueError(f"recipe {recipe!r} keeps kernels in high precision; there is nothing to quantize")
    kernel = show_overflow(kernel)
    op = "grouped_dense" if grouped else "dense"
    chosen: Any = backend_for(op, backend or ambient_backend.value, recipe)
    chosen = xla_grouped if grouped else chosen
    # States under `with_max_gradients` have a dtype of their own, which only JAX's differentiation needs.
    scale = precision.scale(as_float32(state), "kernel")

    def run(kernel: Array, scale: Array | None) -> tuple[Any, Array | None]:
        if portable and not grouped:  # whose operands are plain arrays in any case
            return quantize_operand(kernel, quantizer, scale, axis=1)
        return chosen.quantize_operand(kernel, Quantization(quantizer, scale), axis=1)

    ahead = not portable and on_devices >= grouped
    shards = _shards(kernel, kernel_axes, quantizer, state, grouped) if ahead else None
    if shards is not None:
        # Devices with other experts have other scales.
        experts = mesh_dims(kernel_axes or (), shards.mesh)[0] if grouped else ()
        others = tuple(axis for axis in shards.manual_axes if axis not in experts)
        group = others if precision.kernel.whole_amax else gathered_axes(kernel_axes or (), shards.mesh)
        form, amax = _on_devices((chosen, quantizer, others, group), shards, (kernel, scale))
    else:
        operand, amax = _in_region(run, kernel, scale, kernel_axes)
        # Plain arrays pass through checkpoints and any transformation; a backend's classes may not.
        form = operand if portable else OpaqueTree.pack(operand)
    guard = Guard.new() if portable else None
    if grouped:  # one for each kernel, as in a stack
        guard = jax.tree.map(lambda constant: jnp.full(kernel.shape[:1], constant), guard)
    return QuantizedKernel(
        form=form, amax=amax, guard=guard, quantizer=quantizer, shape=kernel.shape, dtype=kernel.dtype
    )


def _shards(
    kernel: Array, axes: LogicalAxes | None, quantizer: Quantizer, state: GemmState | None, grouped: bool
) -> Shards | None:
    """Return the kernel's sharding on the mesh if each device can quantize its shard by itself and the calls that read
    it run this way (`jax_te.ops.linear.plan.linear_plan`); else None.
    """
    mesh, whole = device_mesh(), state is None or state["x"]["scale"].ndim == grouped
    if mesh is None or axes is None or ambient_observer.value is not None:
        return None
    # Blocks are those of a whole kernel. The plan of one layer needs its kernel's own shards in any case.
    in_shards = isinstance(quantizer, TensorQuantizer) or (grouped and not gathered_axes(axes, mesh))
    if not in_shards:
        return None
    if not whole or local_shape(kernel.shape, mesh_dims(axes, mesh), mesh) is None:
        return None
    spec, per_device = logical_to_spec(axes, mesh), PartitionSpec(free_axes(mesh))
    each = PartitionSpec(*spec[:1]) if grouped else PartitionSpec()
    return Shards(mesh=mesh, args=(spec, each), out=(per_device, each), cotangents=(spec, each))


def _fwd(spec: tuple[Any, ...], args: tuple[Array, Array | None]) -> tuple[Any, None]:
    (backend, quantizer, others, group), (kernel, scale) = spec, args
    operand, amax = backend.quantize_operand(kernel, Quantization(quantizer, scale, group), axis=1)
    amax = None if amax is None else reduce_max(amax, others)
    return (OpaqueTree.pack(operand, per_device=True), amax), None


# Backward gives zeros: the arguments have passed stop_gradient.
_on_devices = sharded_vjp(_fwd, lambda *_: ((None, None), None))


def _in_region(run: Any, kernel: Array, scale: Array | None, axes: LogicalAxes | None) -> tuple[Any, Array | None]:
    """Return ``run``'s results: arrays of the kernel's shape sharded like it, scales replicated."""
    if current_mesh() is None:
        return run(kernel, scale)
    # Of shapes alone: in the type of an array on Explicit axes is a sharding, which a reshape into blocks refuses.
    abstract = jax.eval_shape(run, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (kernel, scale)))
    out_axes = [axes if leaf.shape == kernel.shape else (None,) * leaf.ndim for leaf in jax.tree.leaves(abstract)]
    leaves = auto_region(lambda *args: jax.tree.leaves(run(*args)), out_axes)(kernel, scale)
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
