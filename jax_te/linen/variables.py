"""The Variables of an NNX module as Linen's collections, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import errors, nnx
from flax import linen as nn
from flax.core import meta, unfreeze

from jax_te.layers.internal import CachedKernel, cache_name
from jax_te.quantize import QuantizedKernel, QuantizerState
from jax_te.recipe import autocast
from jax_te.typing import LogicalAxes

STATE = nnx.variable_name_from_type(QuantizerState)
"""The collection of quantizer states: ``"_overwrite_with_gradient"``."""

KEPT = nnx.variable_name_from_type(CachedKernel, allow_register=True)
"""The collection of kernels kept quantized between microbatches: ``"CachedKernel"``."""


def collections_of(module: nnx.Module, *, boxed: bool) -> dict[str, Any]:
    """The values of all Variables of ``module``: nested dicts, in one collection for each type of Variable.

    Args:
        module: an NNX module.
        boxed: put the arrays that have logical axes into ``nn.LogicallyPartitioned``.

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
    """The module that ``build`` gives, with shapes in place of arrays and without quantizer state.

    >>> build_abstract(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).kernel.get_value()
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    with autocast(None):
        return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def with_variables(module: nnx.Module, variables: Mapping[str, Any], scope: str = "/") -> nnx.Module:
    """A copy of ``module`` that holds ``variables``; quantizer state where they have it, and nowhere else.

    Args:
        module: with arrays, or with shapes.
        variables: collections as `collections_of` gives them, boxed or not.
        scope: named in errors.

    Raises:
        flax.errors.ScopeParamNotFoundError: for a variable that is missing.
        flax.errors.ScopeParamShapeError: for one of another shape.
        ValueError: for variables that the module has no place for.

    >>> from jax_te.layers import LayerNorm
    >>> layer = LayerNorm(2, rngs=nnx.Rngs(0))
    >>> with_variables(layer, {"params": {"scale": jnp.zeros(2), "bias": jnp.ones(2)}})(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    left: dict[str, Any] = meta.unbox(unfreeze(dict(variables)))  # new dicts, from which each value is taken out
    module = nnx.merge(*nnx.split(module))
    for path, layer in nnx.iter_modules(module):
        for kernel, name in getattr(layer, "kernels", {}).items():
            _attach(layer, name, QuantizerState, _find(left, STATE, (*path, name)))
            _attach(layer, cache_name(kernel), CachedKernel, _find(left, KEPT, (*path, cache_name(kernel))))
    graphdef, state = nnx.split(module)
    known, filled = {"params", STATE, KEPT}, []
    for path, variable in nnx.to_flat_state(state):
        known.add(_collection(variable))
        value = _checked(_find(left, _collection(variable), path, take=True), variable, path, scope)
        filled.append((path, variable.replace(value)))
    surplus = jax.tree_util.tree_leaves_with_path({name: left[name] for name in sorted(known & left.keys())})
    if surplus:
        names = ", ".join(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in surplus[:4])
        raise ValueError(
            f"{scope} is a {type(module).__name__} and has no place for {names}"
            f"{', …' if len(surplus) > 4 else ''}: these variables are of another layer, or of other arguments of it"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _collection(variable: nnx.Variable) -> str:
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _find(variables: dict[str, Any], collection: str, path: tuple[Any, ...], *, take: bool = False) -> Any:
    """What is at ``path`` of a collection, None if nothing is; removed from there if told to."""
    node = variables.get(collection, {})
    for part in path[:-1]:
        node = node.get(str(part), {})
    return node.pop(str(path[-1]), None) if take else node.get(str(path[-1]))


def _attach(layer: nnx.Module, name: str, kind: type[nnx.Variable], value: Any) -> None:
    setattr(layer, name, nnx.data(None if value is None else kind(value)))


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
    if axes is None or isinstance(value, QuantizedKernel):  # which is several arrays
        return value
    return nn.LogicallyPartitioned(value, _without_repeats(axes))


def _without_repeats(axes: LogicalAxes) -> LogicalAxes:
    """Each name once: Flax takes none twice, and no rule can split two dimensions over the same mesh axes."""
    return tuple(None if name in axes[:i] else name for i, name in enumerate(axes))
