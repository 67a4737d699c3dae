"""fp32 masters of half-precision and quantized parameters, which the optimizer updates in their place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jax_te.layers import quantizable_modules, quantize_parameters
from jax_te.layers.internal import quantizable_kernels
from jax_te.quantize import QuantizedKernel
from jax_te.sharding import current_mesh, logical_to_spec
from jax_te.sharding.internal import axis_ranks, replica_axes
from jax_te.typing import PyTree


def full_precision(params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return the parameters that the optimizer updates: the masters, and the parameters that have none."""
    return nnx.merge_state(params, masters)


def rounded(params: nnx.State) -> nnx.State:
    """Return new parameters, of which every reader in the same program sees the rounded values.

    XLA for GPUs drops a cast to bf16 whose result is cast back: of a program that draws parameters, too, masters and
    quantized kernels would have the bits of the draws before they were rounded.
    """
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params))
    return jax.lax.optimization_barrier(params) if traced else params


def masters_of(params: nnx.State, stored: nnx.State | None = None, *, distributed: bool = False) -> nnx.State:
    """Return fp32 copies of half-precision and quantized parameters, without the others.

    Args:
        params: in their own dtypes.
        stored: the same parameters as the model stores them, some of them quantized. None: ``params``.
        distributed: of all parameters that replicas can split on the mesh in use, and in their logical axes for that.

    Raises:
        ValueError: if replicas can split none of them.

    >>> state = nnx.State({"a": nnx.Param(jnp.ones(2, jnp.bfloat16)), "b": nnx.Param(jnp.ones(2))})
    >>> list(masters_of(state))
    ['a']
    """
    forms = dict(nnx.to_flat_state(params if stored is None else stored))
    # Selected by what the model stores: a quantized kernel, too, was an fp32 array before.
    less = [
        (path, variable)
        for path, variable in nnx.to_flat_state(params)
        if variable.dtype in (jnp.bfloat16, jnp.float16)
        or isinstance(forms[path].get_value(), QuantizedKernel)
        or (distributed and _is_split(variable))
    ]
    if distributed:
        if axis_ranks("replicas") > 1 and not any(_is_split(variable) for _, variable in less):
            raise ValueError(
                "distributed_optimizer=True splits parameters whose logical_axes name 'fsdp', and the model has none: "
                "leave it False, or give nnx.Param logical_axes (layers of Flax: their own axis names, which place "
                "optimizer state as parameters)"
            )
        less = [(path, v.replace(logical_axes=replica_axes(_axes(v))) if _is_split(v) else v) for path, v in less]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.from_flat_state(less))


def like_full_precision(grads: nnx.State, params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return gradients of parameters as the optimizer takes them: in the axes of `full_precision`."""
    full = dict(nnx.to_flat_state(full_precision(params, masters)))
    return nnx.from_flat_state([(path, full[path].replace(g.get_value())) for path, g in nnx.to_flat_state(grads)])


def _axes(variable: nnx.Variable) -> Any:
    return variable.get_metadata().get("logical_axes")


def _is_split(variable: nnx.Variable) -> bool:
    mesh, axes = current_mesh(), _axes(variable)
    if mesh is None or axes is None:
        return False
    return logical_to_spec(replica_axes(axes), mesh) != logical_to_spec(axes, mesh)


def updated(
    finite: jax.Array, new: nnx.State, full: nnx.State, params: nnx.State, model: nnx.Module
) -> tuple[nnx.State, nnx.State]:
    """Return full-precision values after an update, and as parameters: rounded, or quantized by the ambient recipe.

    Args:
        finite: bool ``[]``; where it is false, nothing changes.
        new: the values after the update, in Variables or not.
        full: those before it.
        params: the parameters before it, which determine forms and dtypes.
        model: with the quantizer states to quantize with.

    Raises:
        ValueError: if a parameter was quantized by another recipe than the ambient one.
    """
    # The parameters are those of the selected values, so that no kernel reads the rounded ones from before.
    full = select(finite, new, full)
    values = dict(nnx.to_flat_state(nnx.as_pure(full)))
    old = dict(nnx.to_flat_state(params))
    for path, module, kernel in quantizable_kernels(model):
        if path in old and isinstance(before := old[path].get_value(), QuantizedKernel):
            # Selected by itself: it may have been quantized with the scale of another state.
            values[path] = select(finite, module.requantized(kernel, values[path], before), before)
    stored = [(path, variable.replace(_as_stored(variable, values[path]))) for path, variable in old.items()]
    return full, nnx.from_flat_state(stored)


def select(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return ``new`` where ``finite``, bool ``[]``, is true, else ``old``."""
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)


def _as_stored(old: Any, new: Any) -> Any:
    return new if isinstance(new, QuantizedKernel) else new.astype(old.dtype)


def store_quantized(model: nnx.Module, fp8_param: bool) -> None:
    """Quantize in place the kernels that ``fp8_param``, the model's configuration or their layer's own recipe names.

    Raises:
        ValueError: if all kernels are to be stored quantized, and there is no recipe that quantizes one.
    """
    own = [module.own_recipe(kernel) for _, module in quantizable_modules(model) for kernel in module.kernels]
    config = getattr(model, "config", None)  # of the models of this package
    every = fp8_param or getattr(config, "fp8_param", False) or getattr(config, "fp4_param", False)
    if every or any(recipe is not None and recipe.holds_kernels for recipe in own):
        quantize_parameters(model, only_marked=not every)
    stored = (getattr(module, kernel).get_value() for _, module, kernel in quantizable_kernels(model))
    if every and not any(isinstance(value, QuantizedKernel) for value in stored):
        raise ValueError(
            "fp8_param (fp4_param) asks for kernels that are stored quantized, and no layer has a recipe that quantizes"
            " one: create the state, and call the step, inside `with autocast(recipe):`, or leave fp8_param out"
        )
