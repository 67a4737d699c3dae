"""The one integer dtype in which ids, positions, labels, lengths and expert numbers are computed with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_te.typing import Array


def as_int32(name: str, x: Array | np.ndarray) -> Array:
    """Return integers as int32; numbers beyond its range become its nearest one, which no table or sequence has.

    Every function that takes an array of integers calls it first. In 8 or 16 bits, a tokenizer's usual dtypes, indices
    and sums wrap around: row 256 is row 0, two lengths of 100 add up to -56, and -100 is the byte 156.

    Args:
        name: argument's name, for the message.
        x: integers ``[...]`` of any width, of JAX or NumPy.

    Raises:
        TypeError: for an array that does not hold integers.

    >>> as_int32("ids", jnp.array([200], jnp.uint8)).dtype, as_int32("ids", jnp.array([2**32 - 1], jnp.uint32)).tolist()
    (dtype('int32'), [2147483647])
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    # NumPy's are limited before they become JAX's, which without its 64-bit mode drops their higher bits.
    library: Any = np if isinstance(x, np.ndarray) else jnp
    limits = np.iinfo(np.int32)
    if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        x = library.minimum(x, x.dtype.type(limits.max))
    if x.dtype.itemsize > 4 and jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = library.maximum(x, x.dtype.type(limits.min))
    return jnp.asarray(x, jnp.int32)


def is_known(x: Any) -> bool:
    """Return whether the values of an array can be read here: not in ``jit``, nor where other processes have a part."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array | np.ndarray):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
