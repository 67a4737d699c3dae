"""Gradients of layers' kernels: their sinks, and summands that devices add once a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te.layers import quantizable_kernels
from jax_te.quantize import QuantizedKernel
from jax_te.sharding import (
    Dims,
    MeshAxes,
    constrain,
    current_mesh,
    free_axes,
    gathered_axes,
    mesh_dims,
    ranks_of,
    reduce_sum,
    summed_axes,
)
from jax_te.typing import Array, DTypeLike, LogicalAxes

Path = tuple[Any, ...]


class SummandPlace(NamedTuple):
    """Placement of the summands of a kernel's gradient: an array ``[*lead, d, k, *n]``, one summand on each device.

    Args:
        lead: number of axes in front, of a stack of layers.
        over: mesh axes of the ``d`` devices.
        dims: mesh axes for each dimension of the kernel.
    """

    lead: int
    over: MeshAxes
    dims: Dims

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the summands."""
        return PartitionSpec(*[None] * self.lead, self.over, *self.dims)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return fp32 zeros for summands; ``shape`` is that of the sum."""
        (_, count), lead = ranks_of(self.over, current_mesh()), self.lead  # type: ignore[arg-type]
        return constrain(jnp.zeros((*shape[:lead], count, *shape[lead:]), jnp.float32), self.spec)

    def with_sum(self, summands: Array, sum_of_others: Array | None) -> Array:
        """Return summands to whose sum ``sum_of_others`` is added: an equal part to each."""
        if sum_of_others is None:
            return constrain(summands, self.spec)
        part = sum_of_others.astype(jnp.float32) / summands.shape[self.lead]
        return summands + constrain(jnp.broadcast_to(jnp.expand_dims(part, self.lead), summands.shape), self.spec)

    def total(self, summands: Array, dtype: DTypeLike, axes: LogicalAxes | None = None) -> Array:
        """Return the sum, fp32, all-reduced in ``dtype``.

        Args:
            summands: fp32.
            dtype: dtype of the communicated gradients.
            axes: logical axes of the sum without ``lead``, reduce-scattered along mesh axes that do not split the
                kernel. None: the kernel's.
        """
        mesh = current_mesh()
        assert mesh is not None
        wanted = self.dims if axes is None else mesh_dims(axes, mesh)
        more = [split[len(own) :] for split, own in zip(wanted, self.dims, strict=True)]
        scatter = tuple(split if set(split) <= set(self.over) else () for split in more)

        def on_device(own: Array) -> Array:
            own = jnp.squeeze(own, self.lead).astype(dtype)
            return reduce_sum(own, self.over, ((),) * self.lead + scatter).astype(jnp.float32)

        out = PartitionSpec(*[None] * self.lead, *(own + more for own, more in zip(self.dims, scatter, strict=True)))
        return jax.shard_map(
            on_device, in_specs=self.spec, out_specs=out, axis_names=set(free_axes(mesh)), check_vma=False
        )(summands)


class KernelGradients(NamedTuple):
    """Computation of the gradients of `quantizable_kernels`.

    Args:
        dtype: dtype in which devices sum kernel gradients.
        once: devices that hold the same shard of a kernel add up once a step; until then each has the sum over its own
            tokens, in fp32. Else they add up in each layer's backward pass.
    """

    dtype: DTypeLike = jnp.float32
    once: bool = False

    def summand_places(self, model: nnx.Module, params: nnx.State) -> dict[Path, SummandPlace]:
        """Return the places of summands, by path, of the kernels among ``params`` whose gradients are kept as these."""
        mesh = current_mesh()
        if mesh is None or not self.once:
            return {}
        names, places = {path for path, _ in nnx.to_flat_state(params)}, {}
        for path, module, name in quantizable_kernels(model):
            axes, shape = module.axes_of(name), getattr(module, name).get_value().shape
            # Summands are fp32, and so would be their reduce-scatter along FSDP's axis in each microbatch.
            whole = self.dtype == jnp.float32 or not gathered_axes(axes, mesh)
            if path in names and whole and (over := summed_axes(axes, mesh)):
                places[path] = SummandPlace(len(shape) - len(axes), over, mesh_dims(axes, mesh))
        return places

    def sinks(self, model: nnx.Module, params: nnx.State) -> dict[Path, Array | None]:
        """Return a sink for each kernel of `quantizable_kernels`; None where none is needed, and outside of ``params``.

        Its values are never read. It has the shape of the kernel, or that of its summands.
        """
        names, places = {path for path, _ in nnx.to_flat_state(params)}, self.summand_places(model, params)
        sinks: dict[Path, Array | None] = {}
        for path, module, name in quantizable_kernels(model):
            kernel = getattr(module, name).get_value()
            if path in places:
                sinks[path] = places[path].zeros(kernel.shape)
            elif path not in names:
                sinks[path] = None
            elif isinstance(kernel, QuantizedKernel):
                sinks[path] = jnp.zeros(kernel.shape, self.dtype)
            else:
                # JAX gives a gradient the dtype of its argument, so that of a bf16 kernel would be rounded to bf16.
                sinks[path] = None if kernel.dtype == self.dtype else jnp.zeros_like(kernel, self.dtype)
        return sinks
