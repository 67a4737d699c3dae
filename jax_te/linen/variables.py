"""Conversion between the Variables of an NNX module and Linen's collections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import errors, nnx
from flax import linen as nn
from flax.core import unfreeze

from jax_te.layers import CachedKernel, QuantizableModule, RecipeModule
from jax_te.linen.sharding import unbox
from jax_te.quantize import USES, QuantizedKernel, QuantizerState, quantizer_variables
from jax_te.recipe import autocast
from jax_te.typing import LogicalAxes

STATE = nnx.variable_name_from_type(QuantizerState)
"""The collection of quantizer states: ``"_overwrite_with_gradient"``."""

CACHED = nnx.variable_name_from_type(CachedKernel, allow_register=True)
"""The collection of cached kernels (between microbatches): ``"CachedKernel"``."""


def collections_of(module: nnx.Module, *, boxed: bool) -> dict[str, Any]:
    """Return the values of all Variables of ``module``: nested dicts, one collection for each type of Variable.

    Args:
        module: an NNX module.
        boxed: whether to put arrays with logical axes into ``nn.LogicallyPartitioned``.

    Raises:
        TypeError: for a module that holds random state.

    >>> from jax_te.layers import LayerNorm
    >>> collections_of(LayerNorm(2, rngs=nnx.Rngs(0)), boxed=False)["params"]["scale"].tolist()
    [1.0, 1.0]
    """
    collections: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.RngState):
            raise TypeError(
                f"{type(module).__name__} holds random state ({'.'.join(map(str, path))}) and Linen modules hold none; "
                "let its call take keys, as the layers of jax_te do"
            )
        node = collections.setdefault(_collection(variable), {})
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = _boxed(variable) if boxed else variable.get_value()
    return collections


def build_abstract(build: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    """Return the module that ``build`` returns, with shapes in place of arrays and without quantizer state.

    Args:
        build: function of ``nnx.Rngs``; it is traced.

    >>> build_abstract(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).kernel.get_value()
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    # The variables decide which layers have quantizer state, not the recipe in force where they are read.
    with autocast(None):
        return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def with_variables(module: nnx.Module, variables: Mapping[str, Any], scope: str = "/") -> nnx.Module:
    """Return a copy of ``module`` that holds ``variables``; a layer has quantizer state only if the variables have it.

    Args:
        module: module with arrays, or with shapes.
        variables: collections as `collections_of` returns them, boxed or not.
        scope: name for errors.

    Raises:
        flax.errors.ScopeParamNotFoundError: for a missing variable.
        flax.errors.ScopeParamShapeError: for a variable of another shape.
        ValueError: for variables that the module does not have.

    >>> from jax_te.layers import LayerNorm
    >>> layer = LayerNorm(2, rngs=nnx.Rngs(0))
    >>> with_variables(layer, {"params": {"scale": jnp.zeros(2), "bias": jnp.ones(2)}})(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    left: dict[str, Any] = unbox(unfreeze(dict(variables)))  # new dicts, from which each value is taken out
    if STATE in left:
        left[STATE] = _without_uses(left[STATE])  # which are Linen's alone
    module = nnx.merge(*nnx.split(module))
    # States and cached kernels come and go with the recipe, so these Variables are attached before the tree is split.
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, RecipeModule):
            for name in layer.state_names:
                setattr(layer, name, nnx.data(quantizer_variables(_find(left, STATE, (*path, name)))))
        if isinstance(layer, QuantizableModule):
            cached = _find(left, CACHED, (*path, "kernel_cache"))
            layer.kernel_cache = nnx.data(None if cached is None else CachedKernel(cached))
    graphdef, state = nnx.split(module)
    known, filled = {"params", STATE, CACHED}, []
    for path, variable in nnx.to_flat_state(state):
        known.add(_collection(variable))
        value = _checked(_find(left, _collection(variable), path, take=True), variable, path, scope)
        filled.append((path, variable.replace(value)))
    # Only in collections that the module has: programs keep values of their own in others.
    surplus = jax.tree_util.tree_leaves_with_path({name: left[name] for name in sorted(known & left.keys())})
    if surplus:
        names = ", ".join(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in surplus[:4])
        raise ValueError(
            f"{scope} is a {type(module).__name__} and has no place for {names}"
            f"{', …' if len(surplus) > 4 else ''}: these variables are of another layer, of other arguments "
            "of it, or of a module that shares its scope (nn.share_scope), which it needs for itself"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _collection(variable: nnx.Variable) -> str:
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _without_uses(states: dict[str, Any]) -> dict[str, Any]:
    """Return a collection of states without the numbers of uses of its layers."""
    return {
        name: _without_uses(node) if isinstance(node, dict) else node for name, node in states.items() if name != USES
    }


def _find(variables: dict[str, Any], collection: str, path: tuple[Any, ...], *, take: bool = False) -> Any:
    """Return the value at ``path`` of a collection, or None; with ``take`` remove it there."""
    node = variables.get(collection, {})
    for part in path[:-1]:
        node = node.get(str(part), {})
    return node.pop(str(path[-1]), None) if take else node.get(str(path[-1]))


def _checked(value: Any, variable: nnx.Variable, path: tuple[Any, ...], scope: str) -> Any:
    name = "/".join(map(str, path))
    if value is None:
        raise errors.ScopeParamNotFoundError(name, scope)
    shape, given = (getattr(array, "shape", None) for array in (variable.get_value(), value))
    if shape is not None and shape != given:
        raise errors.ScopeParamShapeError(name, scope, given, shape)
    return value


def _boxed(variable: nnx.Variable) -> Any:
    axes, value = variable.get_metadata().get("logical_axes"), variable.get_value()
    # A quantized kernel has several arrays, and a box holds one. The gradient of a state is its next value, and Flax's
    # train state reads both as arrays.
    if axes is None or isinstance(value, QuantizedKernel) or isinstance(variable, QuantizerState):
        return value
    return nn.LogicallyPartitioned(value, _without_repeats(axes))


def _without_repeats(axes: LogicalAxes) -> LogicalAxes:
    """Return the axes with each name once: Flax refuses repeats, and a mesh axis shards one dimension only."""
    return tuple(None if name in axes[:i] else name for i, name in enumerate(axes))
