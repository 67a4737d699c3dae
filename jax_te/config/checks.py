"""Checks of configuration fields."""

from __future__ import annotations

import functools
import logging
from typing import Any, get_args, get_type_hints

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by name only once this is imported
import numpy as np

from jax_te.typing import DTypeLike

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that parameters and activations may have."""

COMPUTE_DTYPES = (*FLOAT_DTYPES, "float64")
"""Names of the dtypes that inputs may have: kernels are cast to them, which is no computation in integers or FP8."""


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


def input_error(name: str, dtype: DTypeLike) -> TypeError:
    """Return the error for an input of a dtype that is not in `COMPUTE_DTYPES`."""
    return TypeError(
        f"{name} takes an input of {', '.join(FLOAT_DTYPES)}, in which it computes, and not of {np.dtype(dtype).name}; "
        "cast it first, for example x.astype(jnp.float32)"
    )


def check_positive(**sizes: int) -> None:
    """Raise ValueError for a size that is not an integer >= 1."""
    for name, size in sizes.items():
        # bool is a subclass of int: True would pass as 1.
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def check_rate(**rates: float) -> None:
    """Raise ValueError for a probability outside [0, 1)."""
    for name, rate in rates.items():
        # Written so that nan, for which every comparison is False, is refused as well.
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {rate!r}")


def check_bool(**flags: bool) -> None:
    """Raise TypeError for a flag that is not True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


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


def check_annotations(config: Any, base: type) -> None:
    """Raise TypeError for a flag of ``base`` that is no bool, ValueError for a name that its ``Literal`` lacks."""
    for name, hint in _hints(base):
        if hint is bool:
            check_bool(**{name: getattr(config, name)})
        elif names := _names_in(hint):
            check_choice((None, *names) if type(None) in get_args(hint) else names, **{name: getattr(config, name)})


def literal_names(config: type, field: str) -> tuple[str, ...]:
    """Return the names that a field takes, which its annotation lists: ``Literal[...]`` or ``Literal[...] | None``."""
    return _names_in(dict(_hints(config))[field])


@functools.cache  # evaluating annotations takes longer than all checks together
def _hints(base: type) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(base).items())


def _names_in(hint: Any) -> tuple[str, ...]:
    return tuple(name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str))
