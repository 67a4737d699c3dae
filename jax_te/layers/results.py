"""Results of calls with more than one output."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.typing import Array

_ALLOWED = (
    "return an array, a pair (output, bias), or a NamedTuple whose first field is the output and whose other fields "
    "have names that the caller reads"
)
"""What a layer may return, in messages."""


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
        result: result of the layer.
        layer: name of the layer in messages.

    Raises:
        ValueError: for another tuple without names.
        TypeError: for a list, a dict or None, in place of an array or as the output.

    >>> split_output(1.0), split_output(layer_output(1.0, max_logit=2.0)), split_output((1.0, None))
    ((1.0, {}), (1.0, {'max_logit': 2.0}), (1.0, {'bias': None}))
    """
    if not isinstance(result, tuple):
        return _checked_output(result, layer), {}
    if not hasattr(result, "_fields") and len(result) != 2:
        raise ValueError(f"{layer} returned a tuple of {len(result)} without names; {_ALLOWED}")
    y, *extra = result
    names = getattr(result, "_fields", ("y", "bias"))[1:]
    return _checked_output(y, layer), dict(zip(names, extra, strict=True))


def _checked_output(y: Any, layer: str) -> Array:
    """Return the output ``y``, unless it is something with arrays in it in place of an array."""
    if not jax.tree_util.all_leaves([y]):
        raise TypeError(f"{layer} returned {type(y).__name__} in place of an array; {_ALLOWED}")
    return y


def add_bias(
    result: Any, layer: str, *, known: tuple[str, ...] = (), leading: int | None = 2
) -> tuple[Array, dict[str, Any]]:
    """Return the output of what a layer returned, with the bias added that it may have returned with it, and the extra
    results that the caller uses by their names.

    Args:
        result: result of the layer.
        layer: name of the layer in messages.
        known: names of the extra results that the caller uses, beside a bias.
        leading: number of the output's axes in front of its features, of which a bias has one each. None: the layer
            may return no bias.

    Raises:
        ValueError: for others, and for a bias of another shape than the features: dropping them would change numbers
            in silence. See also `split_output`.
        TypeError: see `split_output`.

    >>> add_bias((jnp.ones((1, 1, 2)), jnp.ones(2)), "query")
    (Array([[[2., 2.]]], dtype=float32), {})
    """
    y, extra = split_output(result, layer)
    bias, features = extra.pop("bias", None), None if leading is None else y.shape[leading:]
    lost = [name for name in extra if name not in known]
    if bias is not None and bias.shape != features:
        lost = [f"a bias of shape {bias.shape}", *lost]
    if lost:
        named = list(known) if features is None else [f"bias {list(features)}", *known]
        pair = "" if features is None else f", a pair (output, bias {list(features)})"
        fields = f", or a NamedTuple of the output and of what it has of {', '.join(named)}" if named else ""
        raise ValueError(
            f"{layer} returned {', '.join(lost)} beside its output, and the layer would drop it; return the output "
            f"alone{pair}{fields}"
        )
    if bias is not None:
        y = y + jnp.expand_dims(bias, range(leading or 0)).astype(y.dtype)
    return y, extra


def output_and_bias(result: Any, layer: str) -> tuple[Array, Array | None]:
    """Return the output of what a layer returned, and the bias that it may have returned with it, to be added later.

    Args:
        result: result of the layer.
        layer: name of the layer in messages.

    Raises:
        ValueError: for other extra results, which would be lost. See also `split_output`.
        TypeError: see `split_output`.

    >>> output_and_bias(layer_output(1.0, bias=2.0), "linear_fc2"), output_and_bias(1.0, "linear_fc2")
    ((1.0, 2.0), (1.0, None))
    """
    y, extra = split_output(result, layer)
    bias = extra.pop("bias", None)
    if extra:
        raise ValueError(
            f"{layer} returned {', '.join(extra)} beside its output, and the layer would drop it; return the output "
            "alone, a pair (output, bias), or a NamedTuple of the output and bias"
        )
    return y, bias


def output_of(result: Any) -> Array:
    """Return the output of what a layer returned, and drop extra results, be they named or not.

    It is for results that are known to be without effect here; `add_bias` refuses those that would be lost.

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
