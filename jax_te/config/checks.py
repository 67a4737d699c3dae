"""Checks of configuration fields."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by name only once this is imported
import numpy as np

from jax_te.typing import DTypeLike

T = TypeVar("T")

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that parameters and activations may have."""

_KINDS: dict[Any, tuple[str, Any]] = {
    bool: ("True or False", bool | np.bool_),
    int: ("an integer", int | np.integer),
    float: ("a finite number", int | float),
}

COMPUTE_DTYPES = (*FLOAT_DTYPES, "float64")
"""Names of the dtypes that inputs and kernels may have: the ops cast kernels to inputs' dtypes."""


def float_dtype(name: str, value: DTypeLike) -> np.dtype:
    """Return ``value`` as a dtype.

    Args:
        name: of the argument, for the message.
        value: anything that ``np.dtype`` takes.

    Raises:
        ValueError: unless it is fp32, bf16 or fp16.
    """
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise ValueError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {value!r}") from None
    if dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {dtype.name}")
    return dtype


def check_float(op: str, *arrays: Any) -> None:
    """Raise TypeError for an array, None apart, whose dtype is not in `COMPUTE_DTYPES`.

    Args:
        op: what takes the arrays, for the message.
        arrays: arrays or `QuantizedKernel`, with the dtype that it was quantized from.
    """
    for array in arrays:
        if array is not None and array.dtype.name not in COMPUTE_DTYPES:
            raise TypeError(
                f"{op} takes arrays of {', '.join(FLOAT_DTYPES)}, in which it computes, and not of {array.dtype.name} "
                f"(here of shape {array.shape}); cast it first, for example x.astype(jnp.float32)"
            )


def check_positive(**sizes: int) -> None:
    """Raise ValueError for a size that is not an integer >= 1."""
    for name, size in sizes.items():
        # bool is a subclass of int: True would pass as 1.
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def check_rate(**rates: float) -> None:
    """Raise ValueError for what is no number, and for a probability outside [0, 1)."""
    check_number(**rates)
    for name, rate in rates.items():
        # Written so that an array's nan, for which every comparison is False, is refused as well.
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {rate!r}")


def check_number(**numbers: float) -> None:
    """Raise ValueError for what is no finite number."""
    _check_kind(float, False, **numbers)


def check_bool(**flags: object) -> None:
    """Raise TypeError for a flag that is not True or False."""
    _check_kind(bool, False, **flags)


def _check_kind(kind: type, optional: bool, **values: Any) -> None:
    """Raise TypeError for a flag, ValueError for a number, that is not of ``kind`` (nor None, if that is optional)."""
    wanted, types_of_kind = _KINDS[kind]
    for name, value in values.items():
        # An array, perhaps a traced one, whose value is not known here; or a scalar of NumPy.
        array = kind is float and getattr(value, "shape", None) == () and value.dtype.kind in "fiuV"
        flag_for_number = isinstance(value, bool) and kind is not bool
        not_finite = isinstance(value, float | np.floating) and not np.isfinite(value)
        fits = array or (isinstance(value, types_of_kind) and not flag_for_number) or (optional and value is None)
        if not fits or not_finite:
            raise (TypeError if kind is bool else ValueError)(f"{name} must be {wanted}, got {value!r}")


def check_choice(allowed: tuple[object, ...], **values: object) -> None:
    """Raise ValueError for a value that is none of those allowed."""
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def log_hints(**hints: object) -> None:
    """Log which hints to CUDA's speed were given (are true): nothing here reads them. Each is logged once a process.

    Args:
        hints: argument or field -> its value, negated where the default is True.
    """
    for name in filter(hints.get, hints):
        _log_hint(name)


# At level INFO: programs written for Megatron pass these everywhere, and their authors have nothing to change.
@functools.cache
def _log_hint(name: str) -> None:
    logging.getLogger("jax_te").info("%s tunes CUDA kernels and has no effect in JAX; see docs/parity.md", name)


@functools.cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message, once a process."""
    logging.getLogger("jax_te").log(level, message)


def check_annotations(config: Any, base: type) -> None:
    """Raise TypeError or ValueError for a field of ``base`` that is not what its annotation says, see `checked`."""
    for name, check in _checks(base).items():
        check(**{name: getattr(config, name)})


def checked(target: T) -> T:
    """Return a function, or a class with a constructor, that refuses what is not as the annotations say.

    These are annotations of bool, int, float and ``Literal``, with or without None. Arguments of other kinds, and the
    ranges of numbers, are for the function itself to check.

    Raises:
        TypeError: when called, for a flag that is not True or False.
        ValueError: when called, for an int that is none, a float that is no finite number and no array, a name that
            ``Literal`` lacks.

    >>> checked(check_rate)(rate=0.5)
    """
    # Python takes "no" for true, and nan goes through all comparisons that are written the usual way.
    function: Any = target.__init__ if isinstance(target, type) else target
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given, checks = dict(zip(names, args, strict=False)) | kwargs, _checks(function)
        for name in given.keys() & checks.keys():
            checks[name](**{name: given[name]})
        return function(*args, **kwargs)

    if not isinstance(target, type):
        return call  # type: ignore[return-value]
    target.__init__ = call
    return target


@functools.cache  # evaluating annotations takes longer than all checks together
def _checks(annotated: Any) -> dict[str, Callable[..., None]]:
    """Return argument -> check of its value, for the annotations that `checked` reads."""
    checks: dict[str, Callable[..., None]] = {}
    for name, hint in get_type_hints(annotated).items():
        kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
        optional, others = type(None) in kinds, [kind for kind in kinds if kind is not type(None)]
        if len(others) != 1:
            continue  # a name or an object: the function itself checks it
        if names := _names_in(hint):
            checks[name] = functools.partial(check_choice, (None, *names) if optional else names)
        elif others[0] in _KINDS:
            checks[name] = functools.partial(_check_kind, others[0], optional)
    return checks


def literal_names(config: type, field: str) -> tuple[str, ...]:
    """Return the names that a field takes, which its annotation lists: ``Literal[...]`` or ``Literal[...] | None``."""
    return _names_in(get_type_hints(config)[field])


def _names_in(hint: Any) -> tuple[str, ...]:
    return tuple(name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str))
