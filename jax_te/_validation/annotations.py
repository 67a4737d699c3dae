"""Arguments and fields that are as their annotations say."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from jax_te._validation.files import brief
from jax_te.typing import Words

T = TypeVar("T")


class Kind(NamedTuple):
    """What an annotation allows.

    Args:
        words: description of an allowed value, for messages.
        holds: test of a value.
        error: type of the exception for any other value.
        plain: whether it is a flag, a number or one of a few names.
        remedy: remedy to name at the end of a message.
    """

    words: str
    holds: Callable[[Any], bool]
    error: type[Exception] = TypeError
    plain: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise the error for a value of an argument, unless it is what it must be."""
        if not self.holds(value):
            parentheses = " (did you forget the parentheses?)" if isinstance(value, type) and not self.plain else ""
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.error(f"{name} must be {self.words}, got {brief(value)}{parentheses}{remedy}")


def checked(target: T) -> T:
    """Return a function, or a class with a constructor, that refuses arguments that its annotations do not allow.

    The function's body does not run before a refusal. An annotation that holds ``Any``, a protocol (such as
    `DTypeLike`) or a type variable allows everything. An array may be any object with a shape and a dtype. The ranges
    of numbers are for the function itself to check. ``Annotated[..., Words(...)]`` gives a message better words than
    the type has.

    Raises:
        TypeError: when called, for a flag that is not True or False, and for an object of another class.
        ValueError: when called, for a non-integer, a float that is not finite, or a name that ``Literal`` does not
            list.

    >>> checked(brief)(value=0.5)
    '0.5'
    """
    # Python takes "no" for true, and nan goes through all comparisons that are written the usual way.
    function: Any = target.__init__ if isinstance(target, type) else target
    names = tuple(inspect.signature(function).parameters)
    # A dataclass's own annotations: its constructor has the text of those of its bases, whose modules know other names.
    annotated = target if "__dataclass_fields__" in vars(target) else function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given, kinds = dict(zip(names, args, strict=False)) | kwargs, _kinds(annotated)
        for name in names:
            if name in given and name in kinds:
                kinds[name].check(name, given[name])
        return function(*args, **kwargs)

    if not isinstance(target, type):
        return call  # type: ignore[return-value]
    target.__init__ = call
    return target


def check_annotations(config: Any, base: type, names: Iterable[str] = ()) -> None:
    """Raise TypeError or ValueError for a field that is not what its annotation says, see `checked`.

    Args:
        config: a dataclass.
        base: the class itself or one of its bases, whose fields are checked.
        names: names of the fields to check; empty: all.
    """
    kinds = _kinds(base)
    for name in names or [field.name for field in dataclasses.fields(base) if field.init]:
        if name in kinds:
            kinds[name].check(name, getattr(config, name))


@functools.cache  # evaluating annotations takes longer than all checks together
def _kinds(annotated: Any) -> dict[str, Kind]:
    """Return argument -> what it must be, without those that may be anything."""
    hints = get_type_hints(annotated, include_extras=True)
    kinds = {name: kind_of(hint) for name, hint in hints.items() if name != "return"}
    return {name: kind for name, kind in kinds.items() if kind is not _ANYTHING}


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, which sizes that are computed often are."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)  # bool is a subclass of int


def _is_float(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    # An array, perhaps a traced one, whose value is not known here; or a scalar of NumPy.
    array = getattr(value, "shape", None) == () and value.dtype.kind in "fiuV"
    return math.isfinite(value) if isinstance(value, float | np.floating) else array


PLAIN: dict[Any, Kind] = {
    bool: Kind("True or False", _is_bool, plain=True),
    int: Kind("an integer", is_integer, ValueError, plain=True),
    float: Kind("a finite number", _is_float, ValueError, plain=True),
}
"""Flags and numbers."""

_ANYTHING = Kind("anything", lambda value: True)
_NONE = Kind("None", lambda value: value is None)
_ARRAY = Kind("an array", lambda value: hasattr(value, "shape") and hasattr(value, "dtype"))
_WORDS: dict[Any, str] = {str: "text", os.PathLike: "a path", Callable: "a function"}
_WORDS |= {Sequence: "a sequence", Iterable: "a sequence", Mapping: "a mapping"}


def kind_of(hint: Any) -> Kind:
    """Return what an annotation allows.

    >>> kind_of(int | None).words
    'an integer or None'
    """
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _in_words(kind_of(parts[0]), parts[1:])
    if origin in PLAIN:
        return PLAIN[origin]
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
    if not isinstance(origin, type) or origin is Any or getattr(origin, "_is_protocol", False):
        return _ANYTHING
    return _instance_of(origin)


def _in_words(kind: Kind, extras: tuple[Any, ...]) -> Kind:
    for extra in extras:
        if isinstance(extra, Words):
            error = kind.error if extra.error is None else extra.error
            kind = kind._replace(words=extra.words or kind.words, remedy=extra.remedy, error=error)
    return kind


def _any_of(kinds: list[Kind]) -> Kind:
    if _ANYTHING in kinds:
        return _ANYTHING
    others = [kind for kind in kinds if kind is not _NONE]
    plain, optional = len(others) == 1 and others[0].plain, _NONE in kinds
    words = " or ".join(dict.fromkeys(kind.words.removeprefix("one of ") for kind in (*others, *[_NONE] * optional)))
    if plain and others[0].words.startswith("one of "):
        words = others[0].words.replace("one of ", "one of None, ", 1)
    error = ValueError if all(kind.error is ValueError for kind in others) else TypeError
    remedy = "; ".join(kind.remedy for kind in kinds if kind.remedy)
    return Kind(words, lambda value: any(kind.holds(value) for kind in kinds), error, plain, remedy)


def _one_of(names: tuple[Any, ...]) -> Kind:
    # An array compares element by element.
    words = f"one of {', '.join(map(repr, names))}"
    return Kind(words, lambda value: isinstance(value, str) and value in names, ValueError, plain=True)


def _tuple_of(parts: tuple[Any, ...]) -> Kind:
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


def _instance_of(kind: type) -> Kind:
    words = _WORDS.get(kind, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")
    if issubclass(kind, Enum):
        words += f" ({', '.join(member.name for member in kind)})"
    if kind in (Sequence, Iterable):  # text would be taken apart, letter by letter
        return Kind(words, lambda value: isinstance(value, kind) and not isinstance(value, str | bytes))
    return Kind(words, lambda value: isinstance(value, kind))


def _class_of(base: type) -> Kind:
    words = f"{base.__name__} or a class derived from it"
    return Kind(words, lambda value: isinstance(value, type) and issubclass(value, base))


def literal_names(config: type, field: str) -> tuple[str, ...]:
    """Return the names that a field takes, which its annotation lists: ``Literal[...]`` or ``Literal[...] | None``."""
    hint = get_type_hints(config)[field]
    return tuple(name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str))
