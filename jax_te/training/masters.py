"""fp32 masters of parameters that are held in less: what the optimizer works on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import QuantizableModule
from jax_te.layers.internal import quantizable_kernels
from jax_te.quantize import QuantizedKernel, quantizer_for


def full_precision(params: nnx.State, masters: nnx.State) -> nnx.State:
    """What the optimizer works on: the masters, and the parameters that have none."""
    return nnx.merge_state(params, masters)


def masters_of(params: nnx.State, held: nnx.State | None = None) -> nnx.State:
    """fp32 copies of the parameters that are held in less, without the others.

    Args:
        params: in their own dtypes.
        held: the same as a model holds them, where some may be quantized kernels. None: ``params``.

    >>> state = nnx.State({"a": nnx.Param(jnp.ones(2, jnp.bfloat16)), "b": nnx.Param(jnp.ones(2))})
    >>> list(masters_of(state))
    ['a']
    """
    forms = dict(nnx.to_flat_state(params if held is None else held))
    less = [
        (path, variable)
        for path, variable in nnx.to_flat_state(params)
        if variable.dtype in (jnp.bfloat16, jnp.float16) or isinstance(forms[path].get_value(), QuantizedKernel)
    ]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.from_flat_state(less))


def parameters_of(full: nnx.State, params: nnx.State, model: nnx.Module) -> nnx.State:
    """The parameters that belong to full-precision values: rounded, or quantized as the recipe in force says.

    Args:
        full: the values.
        params: the parameters before, whose forms and dtypes hold.
        model: with the quantizer states to quantize with.

    Raises:
        ValueError: if a quantized parameter is held as another recipe than the one in force would have it.
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
            f"a kernel of {type(module).__name__} is held as {old.quantizer}, and the train step runs under "
            f"{module.recipe}; call the step under the recipe that the state was created with"
        )
    new = module.quantized(kernel, value, portable=True)
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))  # the dtype it stands for stays


def _rounded(old: Any, new: Any) -> Any:
    if isinstance(old.get_value(), QuantizedKernel):
        return new
    return jax.tree.map(lambda before, after: after.astype(before.dtype), old, new)
