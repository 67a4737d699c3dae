"""Conversion of parameters and quantizer state between NNX modules and Linen variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.linen.module import LinenModule
from jax_te.linen.variables import STATE, build_abstract, collections_of, with_variables
from jax_te.quantize import USES


@checked
def from_nnx(module: nnx.Module) -> dict[str, Any]:
    """Return the variables of an NNX module as ``init`` of its Linen form returns them: with logical axes boxed.

    Values are shared, not copied. For a layer inside of a Linen model, put them below the layer's name in each
    collection.

    Args:
        module: module of `jax_te.layers`, or any NNX module without random state.

    Raises:
        TypeError: for a module that holds random state.

    >>> from jax_te import layers
    >>> from jax_te.linen import LayerNorm
    >>> variables = from_nnx(layers.LayerNorm(2, rngs=nnx.Rngs(0)))
    >>> LayerNorm(2).apply(variables, jnp.array([-3.0, 3.0])).round(3).tolist()
    [-1.0, 1.0]
    """
    collections = collections_of(module, boxed=True)
    if STATE in collections:
        collections[STATE][USES] = jnp.ones((), jnp.float32)
    return collections


@checked
def to_nnx(source: LinenModule | nnx.Module | Callable[[nnx.Rngs], nnx.Module], variables: Mapping[str, Any]) -> Any:
    """Return an NNX module that holds Linen variables; a layer has quantizer state if the variables have it.

    Args:
        source: the module's Linen form; an NNX module, which is not changed and whose values are not read; or a
            function of ``nnx.Rngs`` that builds one, which is traced, not run.
        variables: variables of the Linen form, boxed or not. Values are shared, not copied.

    Raises:
        TypeError: for another type of source.
        flax.errors.ScopeParamNotFoundError, flax.errors.ScopeParamShapeError, ValueError: if the variables do not fit
            the module.

    >>> from jax_te.linen import Linear
    >>> layer = Linear(16, 32)
    >>> to_nnx(layer, layer.init(jax.random.key(0), jnp.ones((2, 16)))).kernel.shape
    (16, 32)
    """
    # Traced, so that no parameters are drawn only to be replaced.
    if isinstance(source, LinenModule):
        source = build_abstract(source.nnx_module)
    elif not isinstance(source, nnx.Module):
        if not callable(source):
            raise TypeError(f"expected a module, or a function of nnx.Rngs that builds one, got {source!r}")
        made = build_abstract(source)
        if not isinstance(made, nnx.Module):
            raise TypeError(f"source must build an NNX module from nnx.Rngs, got {source!r}, which returns {made!r}")
        source = made
    return with_variables(source, variables)
