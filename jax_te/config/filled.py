"""Fields that a configuration computes from its other fields where they are not given."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax_te._validation import brief

_RECORD = "_filled"


class _Replaceable(type):
    """Class of classes whose call, as ``dataclasses.replace`` does it, recognizes fields that were filled in.

    Only the call sees the order of the arguments, which tells a value that the caller gives from an equal one that is
    passed on, and can change them before the dataclass assigns and checks them. ``__post_init__`` is told the values
    alone; a decorator's or ``__init_subclass__``'s function around ``__init__`` is too early, since ``@dataclass`` of
    each subclass writes another one.
    """

    if not TYPE_CHECKING:  # type checkers are to see the dataclass's constructor

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            return super().__call__(*args, **_as_given(fields))

        @property
        def __signature__(cls) -> inspect.Signature:
            parameters = inspect.signature(cls.__init__).parameters.values()
            return inspect.Signature([each for each in parameters if each.name not in ("self", _RECORD)])


def _as_given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments, with what was once given in place of what was filled in."""
    if _RECORD not in fields:
        return fields
    # dataclasses.replace passes its own arguments first, and then the other fields in the order of declaration: what
    # stands behind the record, whose class is the last base, is passed on. So a field may be given the value that it
    # has, and keeps it from then on.
    names = list(fields)
    passed_on = names[names.index(_RECORD) :]
    filled = fields.pop(_RECORD)
    if not isinstance(filled, dict) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in filled.values()):
        raise TypeError(f"{_RECORD} is what dataclasses.replace passes on; leave it out, got {brief(filled)}")
    for name, (given, value) in filled.items():
        if name in passed_on and fields[name] == value:
            fields[name] = given
    return fields


@dataclass(frozen=True, kw_only=True)
class FillsFields(metaclass=_Replaceable):
    """Base, the last one, of a configuration that fills in fields that are not given.

    ``dataclasses.replace`` passes all values as if they had been given. The constructor takes those that were filled in
    as not given, so that ``replace(c, f=v)`` is the configuration built with ``f=v``.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Sizes(FillsFields):
    ...     hidden: int
    ...     ffn: int | None = None
    ...     def __post_init__(self):
    ...         if self.ffn is None:
    ...             self._fill("ffn", 4 * self.hidden)
    >>> from dataclasses import replace
    >>> replace(Sizes(hidden=8), hidden=16), replace(Sizes(hidden=8, ffn=32), hidden=16)
    (Sizes(hidden=16, ffn=64), Sizes(hidden=16, ffn=32))
    """

    # Field -> the value that was given, usually None, and the one that was filled in.
    _filled: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def _fill(self, name: str, value: Any) -> None:
        """Set a field to a value that follows from others, and record what was given."""
        given = getattr(self, name)
        # A list could change later.
        self._filled[name] = tuple(given) if isinstance(given, list) else given, value
        object.__setattr__(self, name, value)  # the dataclass is frozen
