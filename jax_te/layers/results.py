"""Results of calls with more than one output."""

from __future__ import annotations

import collections
import functools
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
