"""Quantization of a kernel before the calls that use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te._validation import check_axes, checked
from jax_te.ops.backend import ambient_backend, backend_for
from jax_te.ops.linear.resolve import usable_weights
from jax_te.ops.linear.spec import LinearWeights
from jax_te.ops.overflow import show_overflow
from jax_te.ops.primitives import GemmBackend
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
    as_float32_inside,
    precision_of,
    quantize_operand,
)
from jax_te.recipe import Recipe
from jax_te.sharding import (
    MeshAxes,
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
    # Rounding to FP8 has no useful derivative; the calls that read the result return the kernel's gradient. States
    # under `with_max_gradients` have a dtype of their own, which stop_gradient passes on as it is.
    kernel, state = jax.lax.stop_gradient((kernel, as_float32_inside(state)))
    precision = precision_of(recipe)
    usable_weights(LinearWeights(kernel, state=state), precision, recipe)  # raises for a missing state
    if (quantizer := precision.kernel.quantizer) is None:
        raise ValueError(f"recipe {recipe!r} keeps kernels in high precision; there is nothing to quantize")
    kernel = show_overflow(kernel)
    scale = precision.scale(state, "kernel")
    op = "grouped_dense" if grouped else "dense"
    # Raises where the backend cannot run the recipe.
    backend_of_calls = backend_for(op, backend or ambient_backend.value, recipe)
    # Grouped GEMMs read one form of a kernel, whichever backend is asked for.
    quantizing: GemmBackend = xla_grouped if grouped else backend_of_calls
    # One layer's calls run on devices wherever its shards allow it; those of grouped kernels, where their rows do, too.
    on_devices_ahead = not portable and (on_devices or not grouped)
    shards = _shards(kernel, kernel_axes, quantizer, state, grouped) if on_devices_ahead else None
    if shards is not None:
        axes = _axes_on_devices(shards, kernel_axes or (), grouped, whole_amax=precision.kernel.whole_amax)
        form, amax = _quantized_on_devices(_OnDevices(quantizing, quantizer, *axes), shards, (kernel, scale))
    else:
        # Plain arrays pass through checkpoints and any transformation; a backend's classes may not. An operand of
        # grouped GEMMs consists of plain arrays in any case.
        in_plain_arrays = portable and not grouped
        operand, amax = _quantized_whole(None if in_plain_arrays else quantizing, quantizer, kernel, scale, kernel_axes)
        form = operand if portable else OpaqueTree.pack(operand)
    return QuantizedKernel(
        form=form,
        amax=amax,
        guard=_guard(kernel, grouped) if portable else None,
        quantizer=quantizer,
        shape=kernel.shape,
        dtype=kernel.dtype,
    )


def _shards(
    kernel: Array, axes: LogicalAxes | None, quantizer: Quantizer, state: GemmState | None, grouped: bool
) -> Shards | None:
    """Return the kernel's sharding on the mesh if each device can quantize its shard by itself and the calls that read
    it run this way (`jax_te.ops.linear.plan.linear_plan`); else None.
    """
    mesh = device_mesh()
    if mesh is None or axes is None or ambient_observer.value is not None:
        return None
    kernels_have_one_scale = state is None or state["x"]["scale"].ndim == int(grouped)
    if not kernels_have_one_scale:  # each part of the batch has its own
        return None
    # Blocks are those of a whole kernel. The plan of one layer needs its kernel's own shards in any case.
    in_shards = isinstance(quantizer, TensorQuantizer) or (grouped and not gathered_axes(axes, mesh))
    if not in_shards or local_shape(kernel.shape, mesh_dims(axes, mesh), mesh) is None:
        return None
    spec, per_device = logical_to_spec(axes, mesh), PartitionSpec(free_axes(mesh))
    scales = PartitionSpec(*spec[:1]) if grouped else PartitionSpec()
    return Shards(mesh=mesh, args=(spec, scales), out=(per_device, scales), cotangents=(spec, scales))


class _OnDevices(NamedTuple):
    """Quantization of each device's shard of a kernel by itself.

    Args:
        backend: backend whose GEMMs read the shards.
        quantizer: the recipe's, of kernels.
        amax_axes: mesh axes over which the amax is reduced, to that of a whole kernel.
        scale_axes: mesh axes whose shards share a current scale.
    """

    backend: GemmBackend
    quantizer: Quantizer
    amax_axes: MeshAxes
    scale_axes: MeshAxes


def _axes_on_devices(
    shards: Shards, kernel_axes: LogicalAxes, grouped: bool, *, whole_amax: bool
) -> tuple[MeshAxes, MeshAxes]:
    """Return the mesh axes over which the amax of a kernel's shards is reduced, and those whose shards share a scale.

    ``whole_amax``: whether a current scale covers the whole kernel, not only the shards that one GEMM reads.
    """
    # Devices with other experts have other kernels.
    experts = mesh_dims(kernel_axes, shards.mesh)[0] if grouped else ()
    amax_axes = tuple(axis for axis in shards.manual_axes if axis not in experts)
    return amax_axes, amax_axes if whole_amax else gathered_axes(kernel_axes, shards.mesh)


def _fwd(spec: _OnDevices, args: tuple[Array, Array | None]) -> tuple[Any, None]:
    kernel, scale = args
    how = Quantization(spec.quantizer, scale, spec.scale_axes)
    operand, amax = spec.backend.quantize_operand(kernel, how, axis=1)
    amax = None if amax is None else reduce_max(amax, spec.amax_axes)
    return (OpaqueTree.pack(operand, per_device=True), amax), None


# Backward gives zeros: the arguments have passed stop_gradient.
_quantized_on_devices = sharded_vjp(_fwd, lambda *_: ((None, None), None))


def _quantized_whole(
    backend: GemmBackend | None, quantizer: Quantizer, kernel: Array, scale: Array | None, axes: LogicalAxes | None
) -> tuple[Any, Array | None]:
    """Return a kernel as an operand of ``backend``, or in plain arrays for None, and its amax.

    On a mesh the compiler partitions it: arrays of the kernel's shape are sharded like it, scales are replicated.
    """

    def quantize(kernel: Array, scale: Array | None) -> tuple[Any, Array | None]:
        if backend is None:
            return quantize_operand(kernel, quantizer, scale, axis=1)
        return backend.quantize_operand(kernel, Quantization(quantizer, scale), axis=1)

    if current_mesh() is None:
        return quantize(kernel, scale)
    # Of shapes alone: in the type of an array on Explicit axes is a sharding, which a reshape into blocks refuses.
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (kernel, scale))
    leaves, treedef = jax.tree.flatten(jax.eval_shape(quantize, *shapes))
    out_axes = [axes if leaf.shape == kernel.shape else (None,) * leaf.ndim for leaf in leaves]
    quantized = auto_region(lambda *args: jax.tree.leaves(quantize(*args)), out_axes)(kernel, scale)
    return jax.tree.unflatten(treedef, quantized)


def _guard(kernel: Array, grouped: bool) -> Guard:
    """Return the guard of a kernel in plain arrays; of grouped kernels, one for each, as in a stack."""
    guard = Guard.new()
    return jax.tree.map(lambda constant: jnp.full(kernel.shape[:1], constant), guard) if grouped else guard
