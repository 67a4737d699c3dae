"""Results of calls with more than one output."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

from jax_te.typing import Array


@functools.cache
def _output_type(names: tuple[str, ...]) -> Any:
    # Cached, because JAX compares the types of tuples: a carry of lax.scan or the branches of lax.cond must have the
    # same type at every call.
    return collections.namedtuple("LayerOutput", ("y", *names))


def layer_output(y: Array, **extra: Any) -> Any:
    """Return a layer's output ``y``, or if there are extra results a NamedTuple of ``y`` and those.

    Args:
        y: the output.
        extra: further results, in the order in which the tuple has them. None is a result like any other: the bias of
            a layer that was built without one.

    >>> layer_output(1.0), layer_output(1.0, bias=None)
    (1.0, LayerOutput(y=1.0, bias=None))
    >>> y, bias = layer_output(1.0, bias=2.0)
    >>> type(layer_output(1.0, bias=2.0)) is type(layer_output(3.0, bias=None))
    True
    """
    return _output_type(tuple(extra))(y, *extra.values()) if extra else y


def split_output(result: Any, layer: str = "a layer inside") -> tuple[Array, dict[str, Any]]:
    """Return the output of what a layer returned, and its extra results by their names.

    A pair without names is read as an output and a bias, None if it is added already: what linear layers, attention and
    MLPs return under Megatron's names.

    Args:
        result: what the layer returned.
        layer: name of the layer in messages.

    Raises:
        ValueError: for another tuple without names.

    >>> split_output(1.0), split_output(layer_output(1.0, max_logit=2.0)), split_output((1.0, None))
    ((1.0, {}), (1.0, {'max_logit': 2.0}), (1.0, {'bias': None}))
    """
    if not isinstance(result, tuple):
        return result, {}
    if not hasattr(result, "_fields") and len(result) != 2:
        raise ValueError(
            f"{layer} returned a tuple of {len(result)} without names; return an array, a pair (output, bias), or a "
            "NamedTuple whose first field is the output and whose other fields have names that the caller reads"
        )
    y, *extra = result
    names = getattr(result, "_fields", ("y", "bias"))[1:]
    return y, dict(zip(names, extra, strict=True))


def output_of(result: Any) -> Array:
    """Return the output of what a layer returned, without extra results, be they named or not.

    >>> output_of(layer_output(1.0, bias=2.0)), output_of(1.0)
    (1.0, 1.0)
    """
    return result[0] if isinstance(result, tuple) else result


def map_output(function: Callable[[Array], Array], result: Any) -> Any:
    """Return what a layer returned, with ``function`` of the output in place of the output.

    >>> map_output(lambda y: y + 1.0, layer_output(1.0, bias=2.0))
    LayerOutput(y=2.0, bias=2.0)
    >>> map_output(lambda y: y + 1.0, (1.0, None))
    (2.0, None)
    """
    if not isinstance(result, tuple):
        return function(result)
    y, *extra = result
    changed: Any = (function(y), *extra)
    kind: Any = type(result)
    return kind(*changed) if hasattr(kind, "_fields") else changed
