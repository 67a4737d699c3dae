"""Arguments and fields that are as their annotations say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

T = TypeVar("T")
_Parameter = inspect.Parameter
_BY_ANY = _Parameter.POSITIONAL_OR_KEYWORD


class Kind(NamedTuple):
    """What an annotation allows.

    Args:
        words: description of an allowed value, for messages.
        holds: test of a value.
        error: type of the exception for any other value.
        plain: whether it is a flag, a number or one of a few names.
        remedy: what to give instead, for the end of a message.
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
    """Return a function, or a class, that refuses arguments which its annotations do not allow.

    Of a class it is the constructor, ``__call__`` and the public methods that the class itself defines. The body does
    not run before a refusal. If the body raises, ``rngs`` gives the keys that it would have given without the call. An
    annotation that holds ``Any``, a protocol or a type variable allows everything. An array may be any object with a
    shape and a dtype. The ranges of numbers are for the function itself to check. ``Annotated[..., Words(...)]`` gives
    a message better words than the type has.

    Raises:
        TypeError: when called, for a flag that is not True or False, and for an object of another class.
        ValueError: when called, for a non-integer, a float that is not finite, or a name that ``Literal`` does not
            list.

    >>> checked(brief)(value=0.5)
    '0.5'
    """
    if not isinstance(target, type):
        return _checked_function(target, target)
    for name, member in list(vars(target).items()):
        if name == "__init__" or not (inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)):
            continue
        if name == "__call__" or not name.startswith("_"):
            setattr(target, name, _checked_method(member))
    # A dataclass's own annotations: its constructor has the text of those of its bases, whose modules know other names.
    annotated = target if "__dataclass_fields__" in vars(target) else target.__init__
    target.__init__ = _checked_function(target.__init__, annotated)
    return target


def _checked_method(member: Any) -> Any:
    if isinstance(member, classmethod | staticmethod):
        return type(member)(_checked_function(member.__func__, member.__func__))
    return _checked_function(member, member)


def _checked_function(function: Any, annotated: Any) -> Any:
    """Return a function that checks its arguments by the annotations of ``annotated``, it or its class."""

    # Python takes "no" for true, and nan goes through all comparisons that are written the usual way.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(function, annotated)
        for (name, kind), value in zip(arguments.positional, args, strict=False):
            kind.check(name, value)
        if arguments.rest is not None:
            name, kind = arguments.rest
            for value in args[len(arguments.positional) :]:
                kind.check(name, value)
        for name, value in kwargs.items():
            if name in arguments.named:
                arguments.named[name].check(name, value)
        if not arguments.draws:
            return function(*args, **kwargs)
        given = dict(zip((name for name, _ in arguments.positional), args, strict=False)) | kwargs
        with _drawn_or_put_back(given.get("rngs")):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _drawn_or_put_back(rngs: Any) -> Iterator[None]:
    """Put back the counts of keys drawn from a ``flax.nnx.Rngs``, or None, if the block raises.

    A layer's inner layers refuse what is out of range after others have drawn their kernels, and the next layer that
    draws from the same streams is to have the kernels that it would have had without the refused call.
    """
    counts = [] if rngs is None else [(stream.count, stream.count.get_value()) for _, stream in rngs.items()]
    try:
        yield
    except BaseException:
        for count, value in counts:
            count.set_value(value)
        raise


class _Arguments(NamedTuple):
    """What the arguments of a function must be, and whether it draws keys from ``rngs``."""

    positional: tuple[tuple[str, Kind], ...]
    rest: tuple[str, Kind] | None
    named: dict[str, Kind]
    draws: bool


@functools.cache  # at the first call: importing the package evaluates no annotations
def _arguments(function: Any, annotated: Any) -> _Arguments:
    kinds, parameters = _kinds(annotated), inspect.signature(function).parameters.values()
    found = [(p.name, p.kind, kinds.get(p.name, _ANYTHING)) for p in parameters]
    positional = tuple((name, kind) for name, how, kind in found if how in (_Parameter.POSITIONAL_ONLY, _BY_ANY))
    rest = [(name, kind) for name, how, kind in found if how is _Parameter.VAR_POSITIONAL and kind is not _ANYTHING]
    named = {name: kind for name, how, kind in found if how in (_BY_ANY, _Parameter.KEYWORD_ONLY)}
    return _Arguments(positional, rest[0] if rest else None, named, "rngs" in named)


def check_annotations(config: Any, base: type, names: Iterable[str] = ()) -> None:
    """Raise TypeError or ValueError for a field that is not what its annotation says, see `checked`.

    Args:
        config: a dataclass.
        base: it or a base, whose fields are checked.
        names: of these fields; empty: all.
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


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OSU"  # text and objects
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_float(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    # An array, perhaps a traced one, whose value is not known here; or a scalar of NumPy.
    array = getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "O") in "fiuV"
    return math.isfinite(value) if isinstance(value, float | np.floating) else array


PLAIN: dict[Any, Kind] = {
    bool: Kind("True or False", _is_bool, plain=True),
    int: Kind("an integer", is_integer, ValueError, plain=True),
    float: Kind("a finite number", _is_float, ValueError, plain=True),
}
"""Flags and numbers."""

_ANYTHING = Kind("anything", lambda value: True)
_NONE = Kind("None", lambda value: value is None)
_ARRAY = Kind("an array", _is_array)
# No text at all would be the current folder.
_TEXT_OF_PATH = Kind("a path", lambda value: isinstance(value, str) and value != "")
_WORDS: dict[Any, str] = {str: "text", os.PathLike: "a path", Callable: "a function"}
_WORDS |= {Sequence: "a sequence", Iterable: "a sequence", Collection: "a collection", Mapping: "a mapping"}
_HOLD_ITEMS = (Sequence, Iterable, Collection, Mapping, list, dict, set, frozenset)


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
    if is_typeddict(origin):
        origin = dict
    if not isinstance(origin, type) or origin is Any or getattr(origin, "_is_protocol", False):
        return _ANYTHING
    if origin is Path:  # the usual spelling of a path in an annotation
        origin = os.PathLike
    return _instance_of(origin, parts)


def _in_words(kind: Kind, extras: tuple[Any, ...]) -> Kind:
    for extra in extras:
        if isinstance(extra, Words):
            error = kind.error if extra.error is None else extra.error
            holds = kind.holds if extra.holds is None else extra.holds
            kind = Kind(extra.words or kind.words, holds, error, kind.plain, extra.remedy)
    return kind


def _any_of(kinds: list[Kind]) -> Kind:
    if _ANYTHING in kinds:
        return _ANYTHING
    if any(kind.words == _WORDS[os.PathLike] for kind in kinds):
        kinds = [_TEXT_OF_PATH if kind.words == _WORDS[str] else kind for kind in kinds]
    others = [kind for kind in kinds if kind is not _NONE]
    plain, optional = len(others) == 1 and others[0].plain, _NONE in kinds
    words = " or ".join(dict.fromkeys(kind.words.removeprefix("one of ") for kind in (*others, *[_NONE] * optional)))
    if plain and others[0].words.startswith("one of "):
        words = others[0].words.replace("one of ", "one of None, ", 1)
    error = ValueError if all(kind.error is ValueError for kind in others) else TypeError
    remedy = "; ".join(kind.remedy for kind in kinds if kind.remedy)
    checks = [kind.holds for kind in others]

    def holds(value: Any) -> bool:
        if value is None and optional:
            return True
        for check in checks:  # noqa: SIM110  # without the frame of a generator: layers' calls come here
            if check(value):
                return True
        return False

    return Kind(words, holds, error, plain, remedy)


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


def _instance_of(kind: type, parts: tuple[Any, ...]) -> Kind:
    words = _WORDS.get(kind, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")
    if issubclass(kind, Enum):
        words += f" ({', '.join(member.name for member in kind)})"
    if kind not in _HOLD_ITEMS:
        return Kind(words, lambda value: isinstance(value, kind))
    item = kind_of(parts[0]) if parts else _ANYTHING
    if item is not _ANYTHING:
        words += f" (each {'key ' if issubclass(kind, Mapping) else ''}{item.words})"

    def holds(value: Any) -> bool:
        # Text would be taken apart, letter by letter, and an array row by row.
        if not isinstance(value, kind) or isinstance(value, str | bytes) or _is_array(value):
            return False
        # Others may be long to read, and an iterator gives its items only once.
        plain = isinstance(value, list | tuple | dict | set | frozenset)
        return item is _ANYTHING or not plain or all(map(item.holds, value))

    return Kind(words, holds)


def _class_of(base: type) -> Kind:
    words = f"{base.__name__} or a class derived from it"
    return Kind(words, lambda value: isinstance(value, type) and issubclass(value, base))


def literal_names(config: type, field: str) -> tuple[str, ...]:
    """Return the names that a field takes, which its annotation lists: ``Literal[...]`` or ``Literal[...] | None``."""
    hint = get_type_hints(config)[field]
    return tuple(name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str))
