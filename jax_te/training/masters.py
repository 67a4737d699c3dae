"""fp32 masters of half-precision and quantized parameters, which the optimizer updates in their place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jax_te.layers import quantizable_kernels, quantizable_modules, quantize_parameters
from jax_te.quantize import QuantizedKernel, same_values
from jax_te.sharding import (
    auto_region,
    axis_ranks,
    constrain,
    current_mesh,
    logical_to_spec,
    replica_axes,
    variable_axes,
)
from jax_te.typing import PyTree


def full_precision(params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return the parameters that the optimizer updates: the masters, and the parameters that have none."""
    return nnx.merge_state(params, masters)


def adopt_changed_params(params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return the masters, replaced by the parameters' values where they do not round to them.

    Parameters that were changed outside of the update, such as loaded or pruned ones, count; elements that were not
    changed keep their masters' bits.

    Args:
        params: parameters as the model stores them.
        masters: masters of some of them, as after the last update.
    """
    stored = dict(nnx.to_flat_state(params))
    return nnx.from_flat_state(
        [(path, master.replace(_adopt_changes(stored[path], master))) for path, master in nnx.to_flat_state(masters)]
    )


def _adopt_changes(variable: nnx.Variable, master: nnx.Variable) -> jax.Array:
    value, exact = variable.get_value(), master.get_value()
    if isinstance(value, QuantizedKernel):
        # Blocks are reshaped, for which an Explicit mesh would require the sharding of each array.
        return auto_region(QuantizedKernel.taken_over, variable_axes(master, exact))(value, exact)
    value = _as_split(value, master)
    wide = value.astype(exact.dtype)
    if value.dtype == jnp.bfloat16:
        # In fp32, which XLA fuses with the update; a cast to bf16 would be a separate pass over the masters on a CPU,
        # and be dropped if it is cast back. Not for fp16, whose subnormal numbers this rounds to 0.
        rounding = jax.lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
        same = rounding == wide
    else:
        same = same_values(exact.astype(value.dtype), value)
    return jax.lax.select(same, exact, wide)


def _as_split(value: jax.Array, master: nnx.Variable) -> jax.Array:
    """Return a device's part of a parameter that corresponds to its shard of the master, which replicas split."""
    axes = _axes(master)
    return value if axes is None else constrain(value, variable_axes(master, master.get_value()))


def round_params(params: nnx.State) -> nnx.State:
    """Return new parameters, of which every reader in the same program sees the rounded values.

    XLA for GPUs drops a cast to bf16 whose result is cast back: in a program that also draws parameters, masters and
    quantized kernels would have the values before rounding.
    """
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params))
    return jax.lax.optimization_barrier(params) if traced else params


def make_masters(params: nnx.State, stored: nnx.State | None = None, *, distributed: bool = False) -> nnx.State:
    """Return fp32 copies of half-precision and quantized parameters, without the others.

    Args:
        params: parameters in their own dtypes.
        stored: the same parameters as the model stores them, some of them quantized. None: ``params``.
        distributed: whether to include all parameters that replicas can split on the mesh in use, in their logical axes
            for that.

    Raises:
        ValueError: if replicas can split none of them.

    >>> state = nnx.State({"a": nnx.Param(jnp.ones(2, jnp.bfloat16)), "b": nnx.Param(jnp.ones(2))})
    >>> list(make_masters(state))
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


def cast_like_full_precision(grads: nnx.State, params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return gradients of parameters in the sharding that the optimizer uses: that of `full_precision`."""
    full = dict(nnx.to_flat_state(full_precision(params, masters)))
    return nnx.from_flat_state([(path, full[path].replace(g.get_value())) for path, g in nnx.to_flat_state(grads)])


def _axes(variable: nnx.Variable) -> Any:
    return variable.get_metadata().get("logical_axes")


def _is_split(variable: nnx.Variable) -> bool:
    mesh, axes = current_mesh(), _axes(variable)
    if mesh is None or axes is None:
        return False
    return logical_to_spec(replica_axes(axes), mesh) != logical_to_spec(axes, mesh)


def apply_update(
    finite: jax.Array | None, new: nnx.State, params: nnx.State, masters: nnx.State, model: nnx.Module
) -> tuple[nnx.State, nnx.State]:
    """Return parameters, rounded or quantized by the ambient recipe, and masters after an update.

    Args:
        finite: bool ``[]``; where it is false, nothing changes: neither masters, nor parameters that differ from them.
            None: the update counts.
        new: the values after the update, in Variables or not.
        params: the parameters before it, which determine forms and dtypes.
        masters: masters before the update.
        model: model with the quantizer states to quantize with, which is not changed.

    Raises:
        ValueError: if a parameter was quantized by another recipe than the ambient one.
    """
    split = dict(nnx.to_flat_state(masters))
    flat = nnx.to_flat_state(params)
    quantized = any(isinstance(variable.get_value(), QuantizedKernel) for _, variable in flat)
    kernels = quantizable_kernels(model) if quantized else []  # a walk over the whole model
    layers = {path: (module, kernel) for path, module, kernel in kernels}
    values = dict(nnx.to_flat_state(nnx.as_pure(new)))
    kept = {path: select(finite, values[path], master.get_value()) for path, master in split.items()}
    stored = []
    for path, variable in flat:
        before = variable.get_value()
        if isinstance(before, QuantizedKernel):
            module, kernel = layers[path]
            after = module.requantized(kernel, values[path], before)
        else:
            # Rounded from the selected master, which is written in any case: for a second use of the values before the
            # selection, XLA keeps them in fp32.
            after = kept.get(path, values[path]).astype(before.dtype)
            # Replicas select in their shards, and all-gather the result.
            before = _as_split(before, split[path]) if path in split else before
        stored.append((path, variable.replace(select(finite, after, before))))
    written = [(path, master.replace(kept[path])) for path, master in split.items()]
    return nnx.from_flat_state(stored), nnx.from_flat_state(written)


def select(finite: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """Return ``new`` where ``finite``, bool ``[]``, is true or None, else ``old``."""
    if finite is None:
        return new

    def selected(after: Any, before: Any) -> jax.Array:
        if jnp.result_type(after) == jnp.result_type(before) and jnp.shape(after) == jnp.shape(before):
            # `jnp.where` is jitted, and JAX traces a call of it for each array, which takes it several times as long.
            return jax.lax.select(finite, after, before)
        return jnp.where(finite, after, before)

    return jax.tree.map(selected, new, old)


def store_quantized(model: nnx.Module, fp8_param: bool) -> None:
    """Quantize in place the kernels that ``fp8_param``, the model's configuration or their layer's own recipe names.

    Raises:
        ValueError: if all kernels are to be stored quantized, but no recipe quantizes any.
    """
    own = [module.own_recipe(kernel) for _, module in quantizable_modules(model) for kernel in module.kernels]
    config = getattr(model, "config", None)  # of the models of this package
    every = fp8_param or getattr(config, "fp8_param", False) or getattr(config, "fp4_param", False)
    if every or any(recipe is not None and recipe.holds_kernels for recipe in own):
        quantize_parameters(model, only_marked=not every)
