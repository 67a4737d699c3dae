"""What the annotation of an argument or a field allows."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from jax_te._validation.files import brief
from jax_te.typing import Words


class Kind(NamedTuple):
    """What an annotation allows.

    Args:
        words: description of an allowed value, for messages.
        holds: test of a value.
        error: type of the exception for any other value.
        plain: whether it is a flag, a number or one of a few names.
        remedy: remedy to name at the end of a message.
        types: classes of which every direct instance is allowed without the test, for the speed of layers' calls.
        names: descriptions of a ``Literal``'s values; empty for anything else.
    """

    words: str
    holds: Callable[[Any], bool]
    error: type[Exception] = TypeError
    plain: bool = False
    remedy: str = ""
    types: frozenset[type] = frozenset()
    names: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise the error for a value of an argument, unless it is what it must be."""
        if type(value) not in self.types and not self.holds(value):
            parentheses = " (did you forget the parentheses?)" if isinstance(value, type) and not self.plain else ""
            remedy = f"; {self.remedy}" if self.remedy else ""
            if not remedy and int in self.types and getattr(value, "shape", None) == ():
                remedy = f"; give int({name})"  # the step of a state is an array without axes
            raise self.error(f"{name} must be {self.words}, got {brief(value)}{parentheses}{remedy}")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, which sizes that are computed often are."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)  # bool is a subclass of int


def has_shape_and_dtype(value: Any) -> bool:
    """Return whether a value has a shape and a dtype, and is neither a class nor an array of text or objects."""
    kind = type(value)
    if _all_are_arrays(kind):
        return True
    if issubclass(kind, np.ndarray | np.generic):
        return value.dtype.kind not in "OSU"  # text and objects
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


@functools.cache
def _all_are_arrays(kind: type) -> bool:
    """Return whether a class says that its instances are arrays: those of JAX, traced ones, shapes with a dtype."""
    return hasattr(kind, "shape") and hasattr(kind, "dtype") and not issubclass(kind, np.ndarray | np.generic)


def _is_float(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    # Arrays without axes, scalars of NumPy among them.
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "O") in "fiuV":
        # The value of one of JAX may be traced, or be computed later: asking for it would wait.
        return bool(np.isfinite(value)) if isinstance(value, np.ndarray | np.generic) else True
    return isinstance(value, float) and math.isfinite(value)


def check_hashable(name: str, value: Any) -> None:
    """Raise TypeError for an array in place of a number, in a dataclass whose fields are part of jit's cache keys."""
    if has_shape_and_dtype(value) and not isinstance(value, np.generic):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number that can be hashed, got an array ({kind}); give float({name})")


PLAIN: dict[Any, Kind] = {
    bool: Kind("True or False", _is_bool, plain=True, types=frozenset({bool, np.bool_})),
    int: Kind("an integer", is_integer, ValueError, plain=True, types=frozenset({int})),
    float: Kind("a finite number", _is_float, ValueError, plain=True),
}
"""Flags and numbers."""

ANYTHING = Kind("anything", lambda value: True)
_NONE = Kind("None", lambda value: value is None, types=frozenset({type(None)}))
_ARRAY = Kind("an array", has_shape_and_dtype)
_TEXT = Kind("text", lambda value: isinstance(value, str), types=frozenset({str}))
_PATH = Kind("a path", lambda value: isinstance(value, os.PathLike), types=frozenset({os.PathLike}))
# No text at all would be the current folder.
_TEXT_OF_PATH = Kind("a path", lambda value: isinstance(value, str) and value != "")
_WORDS: dict[Any, str] = {Callable: "a function", Collection: "a collection", Mapping: "a mapping"}
_WORDS |= {Sequence: "a sequence", Iterable: "a sequence"}
_HOLD_ITEMS = (Sequence, Iterable, Collection, Mapping, list, dict, set, frozenset)


def kind_of(hint: Any) -> Kind:
    """Return what an annotation allows.

    >>> kind_of(int | None).words
    'an integer or None'
    """
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if isinstance(hint, TypeVar):
        return _of_variable(hint)
    if origin is Annotated:
        return _in_words(kind_of(parts[0]), parts[1:])
    if origin is np.integer:  # an int may be one of NumPy, too
        return PLAIN[int]
    if origin in PLAIN:
        return PLAIN[origin]
    if origin is str:
        return _TEXT
    if origin in (os.PathLike, Path):  # Path is the usual spelling of a path in an annotation
        return _PATH
    if isinstance(hint, dataclasses.InitVar):
        return kind_of(hint.type)
    if origin in (types.UnionType, Union):
        return _any_of([kind_of(part) for part in parts])
    if origin is Literal:
        return _one_of(parts)
    if origin is tuple and parts:
        return _tuple_of(parts)
    if origin is type and parts and isinstance(parts[0], type):
        return _class_of(parts[0])
    if origin in (None, type(None)):
        return _NONE
    # Not by importing jax: configurations do without it.
    if origin in (np.ndarray, getattr(sys.modules.get("jax"), "Array", None)):
        return _ARRAY
    if is_typeddict(origin):
        origin = dict
    if not isinstance(origin, type) or origin in (Any, object) or getattr(origin, "_is_protocol", False):
        return ANYTHING
    return _instance_of(origin, parts)


def _of_variable(variable: TypeVar) -> Kind:
    """Return what a type variable stands for: one of its constraints, what its bound allows, or anything."""
    if variable.__constraints__:
        return _any_of([kind_of(each) for each in variable.__constraints__])
    return ANYTHING if variable.__bound__ is None else kind_of(variable.__bound__)


def _in_words(kind: Kind, extras: tuple[Any, ...]) -> Kind:
    """Return a kind as the `Words` among the extras of ``Annotated`` describe and test it."""
    for extra in extras:
        if isinstance(extra, Words):
            error = kind.error if extra.error is None else extra.error
            holds = kind.holds if extra.holds is None else extra.holds
            types = kind.types if extra.holds is None else frozenset()
            words, names = (extra.words, ()) if extra.words else (kind.words, kind.names)
            kind = Kind(words, holds, error, kind.plain, extra.remedy or kind.remedy, types, names)
    return kind


def _any_of(kinds: list[Kind]) -> Kind:
    """Return the kind of a value that is of one of several kinds."""
    if ANYTHING in kinds:
        return ANYTHING
    if any(kind is _PATH for kind in kinds):
        kinds = [_TEXT_OF_PATH if kind is _TEXT else kind for kind in kinds]
    others = [kind for kind in kinds if kind is not _NONE]
    plain, optional = len(others) == 1 and others[0].plain, _NONE in kinds
    names: tuple[str, ...] = ()
    if plain and others[0].names:
        names = ("None", *others[0].names)
        words = _of_names(names)
    else:
        named = [", ".join(kind.names) or kind.words for kind in (*others, *[_NONE] * optional)]
        words = " or ".join(dict.fromkeys(named))
    error = ValueError if all(kind.error is ValueError for kind in others) else TypeError
    remedy = "; ".join(kind.remedy for kind in kinds if kind.remedy)
    tests = [kind.holds for kind in others]

    def holds(value: Any) -> bool:
        if value is None and optional:
            return True
        for test in tests:  # noqa: SIM110  # without the frame of a generator: calls of layers come here
            if test(value):
                return True
        return False

    types = frozenset().union(*(kind.types for kind in kinds))
    return Kind(words, holds, error, plain, remedy, types, names)


def _one_of(values: tuple[Any, ...]) -> Kind:
    """Return the kind of ``Literal[values]``."""
    names = tuple(map(repr, values))
    # An array compares element by element, and True is equal to 1.
    classes = tuple({type(value) for value in values})
    return Kind(
        _of_names(names),
        lambda value: _is_of(value, classes) and value in values,
        ValueError,
        plain=True,
        names=names,
    )


def _of_names(names: tuple[str, ...]) -> str:
    return f"one of {', '.join(names)}"


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _tuple_of(parts: tuple[Any, ...]) -> Kind:
    """Return the kind of ``tuple[parts]``."""
    repeated = parts[-1] is Ellipsis
    kinds = [kind_of(part) for part in parts if part is not Ellipsis]
    words = f"{kinds[0].words}, ..." if repeated else ", ".join(kind.words for kind in kinds)

    def holds(value: Any) -> bool:
        if not isinstance(value, tuple) or not (repeated or len(value) == len(kinds)):
            return False
        return all(
            kind.holds(item) for kind, item in zip(kinds * len(value) if repeated else kinds, value, strict=True)
        )

    return Kind(f"a tuple ({words})", holds)


def _instance_of(kind: type, parts: tuple[Any, ...]) -> Kind:
    """Return the kind of an instance of a class; ``parts``: what its items must be, as ``list[int]`` says it."""
    words = _WORDS.get(kind, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")
    if issubclass(kind, Enum):
        words += f" ({', '.join(member.name for member in kind)})"
    if kind is Callable:  # Python's own test, without the detour over an abstract class
        return Kind(words, callable)
    if kind not in _HOLD_ITEMS:
        return Kind(words, lambda value: isinstance(value, kind), types=frozenset({kind}))
    item = kind_of(parts[0]) if parts else ANYTHING
    if item is not ANYTHING:
        words += f" (each {'key ' if issubclass(kind, Mapping) else ''}{item.words})"

    def holds(value: Any) -> bool:
        # Text would be taken apart, letter by letter, and an array row by row.
        if not isinstance(value, kind) or isinstance(value, str | bytes | np.ndarray) or has_shape_and_dtype(value):
            return False
        # Others may be long to read, and an iterator gives its items only once.
        plain = isinstance(value, list | tuple | dict | set | frozenset)
        return item is ANYTHING or not plain or all(map(item.holds, value))

    return Kind(words, holds)


def _class_of(base: type) -> Kind:
    """Return the kind of ``type[base]``."""
    words = f"{base.__name__} or a class derived from it"
    return Kind(words, lambda value: isinstance(value, type) and issubclass(value, base))


def literal_names(config: type, field: str) -> tuple[str, ...]:
    """Return the names that a field takes, which its annotation lists: ``Literal[...]`` or ``Literal[...] | None``."""
    hint = get_type_hints(config)[field]
    return tuple(name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str))


@functools.cache  # evaluating annotations takes longer than all checks together
def kinds_of(annotated: Any) -> dict[str, Kind]:
    """Return argument or field -> what it must be, without those that may be anything.

    >>> kinds_of(brief)
    {}
    """
    hints = get_type_hints(annotated, include_extras=True)
    kinds = {name: kind_of(hint) for name, hint in hints.items() if name != "return"}
    return {name: kind for name, kind in kinds.items() if kind is not ANYTHING}
