"""`checked`: refuse arguments and fields that their annotations do not allow, before the body runs.

Python takes "no" for true, and nan goes through all comparisons that are written the usual way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from jax_te._validation.kinds import Kind, check_hashable, kinds_of
from jax_te._validation.undo import undoing

T = TypeVar("T")


def checked(target: T) -> T:
    """Return a function, or a class, that refuses arguments which its annotations do not allow.

    Of a class it is the constructor, ``__call__`` and the public methods that the class itself defines. The body does
    not run before a refusal. If the body raises, ``rngs`` gives the keys that it would have given without the call, and
    ``__call__`` leaves the state of modules as it was, see `on_failure`. An annotation that holds ``Any`` or a protocol
    allows everything, and so does that of ``**kwargs``. An array may be any object with a shape and a dtype. The ranges
    of numbers are for the function itself to check. ``Annotated[..., Words(...)]`` gives a message better words than
    the type has.

    Raises:
        TypeError: when called, for a flag that is not True or False, and for an object of another class.
        ValueError: when called, for a non-integer, a float that is not finite, or a name that ``Literal`` does not
            list.

    >>> from jax_te._validation import brief
    >>> checked(brief)(value=0.5)
    '0.5'
    """
    if not isinstance(target, type):
        return _checked_function(target, target)
    for name, member in list(vars(target).items()):
        if name == "__init__" or not (inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)):
            continue
        if name == "__call__":
            setattr(target, name, _checked_function(_with_undoing(member), member))
        elif not name.startswith("_"):
            setattr(target, name, _checked_method(member))
    # A dataclass's own annotations: its constructor has the text of those of its bases, whose modules know other names.
    annotated = target if "__dataclass_fields__" in vars(target) else target.__init__
    target.__init__ = _checked_function(target.__init__, annotated)
    return target


def _checked_method(member: Any) -> Any:
    """Return a function, classmethod or staticmethod of a class, checked."""
    if isinstance(member, classmethod | staticmethod):
        return type(member)(_checked_function(member.__func__, member.__func__))
    return _checked_function(member, member)


def _with_undoing(function: Any) -> Any:
    """Return a function whose changes are undone if it raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with undoing():
            return function(*args, **kwargs)

    return call


def _checked_function(function: Any, annotated: Any) -> Any:
    """Return a function that checks its arguments by the annotations of ``annotated``, it or its class."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(function, annotated)
        arguments.check(args, kwargs)
        if not arguments.draws_keys:
            return function(*args, **kwargs)
        with _drawn_or_put_back(arguments.rngs(args, kwargs)):
            return function(*args, **kwargs)

    return call


class _Arguments:
    """What the arguments of a function must be."""

    def __init__(self, kinds: dict[str, Kind], parameters: Iterable[inspect.Parameter]):
        given = list(parameters)
        by_place = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = [p.name for p in given if p.kind is p.VAR_POSITIONAL]
        by_name = [p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        # Without those that may be anything, such as self.
        self.by_place = [(place, name, kinds[name]) for place, name in enumerate(by_place) if name in kinds]
        self.rest = [(len(by_place), name, kinds[name]) for name in rest if name in kinds]
        self.by_name = {name: kinds[name] for name in by_name if name in kinds}
        self.draws_keys = "rngs" in by_name
        self.place_of_rngs = by_place.index("rngs") if "rngs" in by_place else None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise the error of the first argument that is not what it must be."""
        for place, name, kind in self.by_place:
            if place >= len(args):
                break
            kind.check(name, args[place])
        for place, name, kind in self.rest:
            for value in args[place:]:
                kind.check(name, value)
        for name, value in kwargs.items():
            if (kind := self.by_name.get(name)) is not None:
                kind.check(name, value)

    def rngs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the ``rngs`` of a call, None without any."""
        if self.place_of_rngs is not None and self.place_of_rngs < len(args):
            return args[self.place_of_rngs]
        return kwargs.get("rngs")


@functools.cache  # at the first call: importing the package evaluates no annotations
def _arguments(function: Any, annotated: Any) -> _Arguments:
    return _Arguments(kinds_of(annotated), inspect.signature(function).parameters.values())


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


def check_annotations(config: Any, base: type, names: Iterable[str] = ()) -> None:
    """Raise TypeError or ValueError for a field that is not what its annotation says, see `checked`.

    Args:
        config: a dataclass.
        base: the class itself or one of its bases, whose fields are checked.
        names: names of the fields to check; empty: all.
    """
    kinds, is_hashed = kinds_of(base), type(config).__hash__ not in (None, object.__hash__)
    for name in names or [field.name for field in dataclasses.fields(base) if field.init]:
        if name in kinds:
            kinds[name].check(name, getattr(config, name))
            if is_hashed and kinds[name].plain:
                check_hashable(name, getattr(config, name))
