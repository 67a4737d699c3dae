"""fp32 masters of half-precision and quantized parameters, which the optimizer updates in their place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import QuantizableModule
from jax_te.layers.internal import quantizable_kernels
from jax_te.quantize import QuantizedKernel, quantizer_for


def full_precision(params: nnx.State, masters: nnx.State) -> nnx.State:
    """Return the parameters that the optimizer updates: the masters, and the parameters that have none."""
    return nnx.merge_state(params, masters)


def masters_of(params: nnx.State, stored: nnx.State | None = None) -> nnx.State:
    """Return fp32 copies of half-precision and quantized parameters, without the others.

    Args:
        params: in their own dtypes.
        stored: the same parameters as the model stores them, some of them quantized. None: ``params``.

    >>> state = nnx.State({"a": nnx.Param(jnp.ones(2, jnp.bfloat16)), "b": nnx.Param(jnp.ones(2))})
    >>> list(masters_of(state))
    ['a']
    """
    forms = dict(nnx.to_flat_state(params if stored is None else stored))
    # Selected by what the model stores: a quantized kernel, too, was an fp32 array before.
    less = [
        (path, variable)
        for path, variable in nnx.to_flat_state(params)
        if variable.dtype in (jnp.bfloat16, jnp.float16) or isinstance(forms[path].get_value(), QuantizedKernel)
    ]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.from_flat_state(less))


def parameters_of(full: nnx.State, params: nnx.State, model: nnx.Module) -> nnx.State:
    """Return full-precision values as parameters: rounded, or quantized by the ambient recipe.

    Args:
        full: the values.
        params: the parameters before, which determine forms and dtypes.
        model: with the quantizer states to quantize with.

    Raises:
        ValueError: if a parameter was quantized by another recipe than the ambient one.
    """
    values = dict(nnx.to_flat_state(full))
    old = dict(nnx.to_flat_state(params))
    for path, module, kernel in quantizable_kernels(model):
        before = old[path].get_value()
        if isinstance(before, QuantizedKernel):
            values[path] = old[path].replace(_requantized(module, kernel, before, values[path].get_value()))
    return nnx.from_flat_state([(path, _rounded(variable, values[path])) for path, variable in old.items()])


def _requantized(module: QuantizableModule, kernel: str, old: QuantizedKernel, value: Any) -> QuantizedKernel:
    if quantizer_for(module.recipe, "kernel") != old.quantizer:
        raise ValueError(
            f"a kernel of {type(module).__name__} is stored as {old.quantizer}, and the train step runs under "
            f"{module.recipe}; call the step under the recipe that the state was created with"
        )
    new = module.quantized(kernel, value, portable=True)
    # In the old structure, whose static dtype is that of the parameter: the master was fp32, and another structure
    # would compile the next step again.
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))


def _rounded(old: Any, new: Any) -> Any:
    if isinstance(old.get_value(), QuantizedKernel):
        return new
    return jax.tree.map(lambda before, after: after.astype(before.dtype), old, new)
