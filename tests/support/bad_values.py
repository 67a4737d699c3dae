"""Values that are wrong for most arguments, and what tells whether an annotation allows one."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import InitVar
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, is_typeddict

import jax
import jax.numpy as jnp
import numpy as np

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
NUMBERS: dict[Any, Any] = {bool: bool | np.bool_, int: int | np.integer, float: int | float | np.number}
VALUES: list[Any] = [
    "no",
    "",
    "True",
    b"1",
    1j,
    [],
    (),
    {},
    {1},
    object(),
    object,
    len,
    NAN,
    INF,
    -INF,
    None,
    True,
    False,
]
VALUES += [
    0,
    1,
    -1,
    1.5,
    2.0,
    -1.5,
    HUGE,
    ["no"],
    ("no", 1),
    ("no", "no", 1.5),
    {"no": 1},
    np.bool_(True),
    jnp.ones(2),
]
VALUES += [
    np.int32(1),
    np.float32(2),
    np.float32("nan"),
    np.float64("inf"),
    bytearray(b"1"),
    slice(1),
    SystemError("no"),
]


def allows(hint: Any, value: Any) -> bool:
    """Whether an annotation allows a value, or does not say."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if isinstance(kind, TypeVar):
        parts = kind.__constraints__ if kind.__bound__ is None else (kind.__bound__,)
        return not parts or any(allows(part, value) for part in parts)
    if isinstance(kind, InitVar):
        return allows(kind.type, value)
    if kind in (UnionType, Union):
        return any(allows(part, value) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is tuple and parts:
        each = parts[:1] * len(value) if parts[-1] is ... and isinstance(value, tuple) else parts
        return isinstance(value, tuple) and len(value) == len(each) and all(map(allows, each, value))
    if kind in (jax.Array, np.ndarray):
        return hasattr(value, "shape")
    if is_typeddict(kind):
        return isinstance(value, dict)
    if kind is Path:
        return isinstance(value, Path)
    if kind in NUMBERS:
        number = isinstance(value, NUMBERS[kind]) and isinstance(value, bool | np.bool_) == (kind is bool)
        return number and (kind is not float or (value is not HUGE and math.isfinite(value)))
    if kind in (Sequence, Iterable, Collection) and (isinstance(value, str | bytes) or hasattr(value, "shape")):
        return False
    return not isinstance(kind, type) or kind is Any or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


@contextlib.contextmanager
def calls_of(function: Any) -> Iterator[list[str]]:
    """Give a list to which each call of a function, or of a class's constructor, adds its name."""
    target = inspect.unwrap(vars(function).get("__init__", function) if isinstance(function, type) else function)
    code, entered = target.__code__, []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            entered.append(code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(before)
