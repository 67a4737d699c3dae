"""Dataclasses as pytrees whose structures differ between classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.tree_util import GetAttrKey

_Class = TypeVar("_Class", bound=type[Any])


def register_dataclass(kind: _Class) -> _Class:
    """Register a dataclass as a pytree whose structure equals that of no other class, and return it.

    ``jax.tree_util.register_dataclass`` does not promise the latter: JAX 0.10 to 0.12 compares structures of its
    dataclasses by static fields and numbers of children, not by class. A jitted function that is called with two such
    classes may then run the first one's program for the second, and return the first class, where their hashes meet.
    Users have classes of their own beside those of this package: a subclass of a state, or another `LossScale`.

    Args:
        kind: dataclass; a field with ``metadata={"static": True}`` is static.

    >>> @register_dataclass
    ... @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     unit: str = dataclasses.field(metadata={"static": True})
    >>> jax.tree.map(lambda x: 2 * x, Point(1.5, "m"))
    Point(x=3.0, unit='m')
    """
    fields = dataclasses.fields(kind)
    data = tuple(field.name for field in fields if not field.metadata.get("static"))
    static = tuple(field.name for field in fields if field.metadata.get("static"))

    def static_values(tree: Any) -> tuple[Any, ...]:
        return tuple(getattr(tree, name) for name in static)

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, name) for name in data), static_values(tree)

    def flatten_with_keys(tree: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        return tuple((GetAttrKey(name), getattr(tree, name)) for name in data), static_values(tree)

    def unflatten(values: tuple[Any, ...], children: Iterable[Any]) -> Any:
        return kind(**dict(zip(data + static, (*children, *values), strict=True)))

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
    return kind
