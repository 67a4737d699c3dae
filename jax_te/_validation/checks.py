"""Checks of arguments and fields."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by name only once this is imported
import numpy as np

from jax_te._validation.files import brief
from jax_te._validation.kinds import PLAIN, has_shape_and_dtype, is_integer
from jax_te.typing import DTypeLike

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that parameters and activations may have."""

COMPUTE_DTYPES = (*FLOAT_DTYPES, "float64")
"""Names of the dtypes that inputs and kernels may have: the ops cast kernels to inputs' dtypes."""


def float_dtype(name: str, value: DTypeLike) -> np.dtype:
    """Return ``value`` as a dtype.

    Args:
        name: argument's name, for the message.
        value: anything that ``np.dtype`` takes.

    Raises:
        ValueError: unless it is fp32, bf16 or fp16.
    """
    if dtype_name(value) not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {dtype_name(value)}")
    return np.dtype(value)


def dtype_name(value: Any) -> str:
    """Return the name of a dtype, or in short what was given in its place.

    >>> dtype_name(np.float32), dtype_name("no")
    ('float32', "'no'")
    """
    try:
        return np.dtype(value).name
    except Exception:  # NumPy's are of several types
        return brief(value)


def check_float(op: str, *arrays: Any, allowed: tuple[str, ...] = COMPUTE_DTYPES) -> None:
    """Raise TypeError for an array, None apart, whose dtype is not allowed.

    Args:
        op: operation that takes the arrays, for the message.
        arrays: arrays or `QuantizedKernel`, with the dtype that it was quantized from.
        allowed: names of the dtypes. Ops whose arithmetic is fp32 pass `FLOAT_DTYPES`: of fp64 arrays they would return
            fp64 arrays with fp32's digits.
    """
    for array in arrays:
        if array is not None and array.dtype.name not in allowed:
            raise TypeError(
                f"{op} takes arrays of {', '.join(allowed)}, and not of {array.dtype.name} "
                f"(here of shape {array.shape}); cast it first, for example x.astype(jnp.float32)"
            )


def check_axes(name: str, array: Any, at_least: int = 1) -> None:
    """Raise ValueError for an array that has fewer axes than its argument's description says."""
    if array.ndim < at_least:
        raise ValueError(f"{name} must have {at_least} axes or more, got an array of shape {tuple(array.shape)}")


def check_leaves(name: str, tree: Any) -> None:
    """Raise TypeError for a leaf of a pytree that is not an array."""
    import jax  # configurations do without it

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not has_shape_and_dtype(leaf):
            where = jax.tree_util.keystr(path)
            raise TypeError(f"{name} must be a pytree of arrays, got {brief(leaf)}{where and f' at {where}'}")


def check_positive(**sizes: int) -> None:
    """Raise ValueError for a size that is not an integer >= 1, or that no array can have."""
    for name, size in sizes.items():
        if not is_integer(size) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if size >= 2**63:
            raise ValueError(f"{name} must be an integer below 2^63, got {brief(size)}")


def check_rate(**rates: float) -> None:
    """Raise ValueError for anything but a number, and for a probability outside [0, 1)."""
    check_number(**rates)
    for name, rate in rates.items():
        # Written so that an array's nan, for which every comparison is False, is refused as well.
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {rate!r}")


def check_number(**numbers: float) -> None:
    """Raise ValueError for anything but a finite number."""
    for name, number in numbers.items():
        PLAIN[float].check(name, number)


def check_bool(**flags: object) -> None:
    """Raise TypeError for a flag that is not True or False."""
    for name, flag in flags.items():
        PLAIN[bool].check(name, flag)


def check_seed(seed: Any) -> None:
    """Raise TypeError for a seed that is not a Python integer, ValueError for one outside [0, 2^32).

    JAX and grain take seeds of 32 bits, and drop higher bits without a word.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):  # bool is a subclass of int
        raise TypeError(f"a seed must be a Python integer, got {seed!r}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed must be in [0, 2^32), got {seed}")


def check_choice(allowed: tuple[object, ...], **values: object) -> None:
    """Raise ValueError for a value that is none of those allowed."""
    for name, value in values.items():
        if not isinstance(value, Hashable) or value not in allowed:  # arrays compare element by element
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
