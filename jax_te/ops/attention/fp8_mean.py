"""FP8 codes that carry ``sum(out * do)``, which is all that backward reads of the output.

Backward subtracts that sum, the mean of the gradient of the softmax under its own weights, from each score's gradient.
Where a query attends to few keys the difference is small beside the sum, and the rounding of an FP8 output is larger
than what is left. An output in the compute dtype has a sum that is exact enough, but FP8 kernels read codes; the codes
made here have the sum of that output.
"""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.quantize import AttentionPrecision, QuantizedTensor, amax, power_of_two_scale
from jax_te.typing import Array


def codes_with_mean(out: Array, do: QuantizedTensor, precision: AttentionPrecision) -> QuantizedTensor:
    """Return codes ``[b, sq, n, dv]`` whose sum with ``do`` over ``dv`` is that of ``out``, and nothing else of it.

    Args:
        out: output of attention ``[b, sq, n, dv]``.
        do: its gradient, quantized.
        precision: the recipe.
    """
    gradient = do.values().astype(jnp.float32)
    total = jnp.sum(out.astype(jnp.float32) * gradient, axis=-1, keepdims=True)
    first, second = jnp.split(gradient, 2, axis=-1)
    # Multiples of the gradient itself: of all vectors with this sum the shortest.
    weight = _per_square(total, first, beside=second)
    # A power of two, so that codes do not depend on which rows have one scale, as on a mesh.
    largest = amax(weight * jnp.max(jnp.abs(first), axis=-1, keepdims=True))
    scale = power_of_two_scale(largest, precision.dtype)
    carried = precision.quantize(weight * first, scale)
    # The first half carries the sum to about one part in 200, by the rounding of its codes. The second one carries what
    # is missing as exactly, so that both together are closer than the compute dtype.
    missing = total - jnp.sum(carried.values().astype(jnp.float32) * first, axis=-1, keepdims=True)
    rest = precision.quantize(_per_square(missing, second, beside=first) * second, scale)
    data = jnp.concatenate([carried.data, rest.data], axis=-1)
    return QuantizedTensor(data=data, scale_inv=carried.scale_inv, dtype=out.dtype)


def _per_square(x: Array, half: Array, *, beside: Array) -> Array:
    """Return ``x / sum(half^2)`` ``[b, s, n, 1]``; 0 where that half of the gradient is small beside the other one.

    There it would take large values to carry a sum, and the scale, which is one for all rows, would follow them.
    """
    square, other = (jnp.sum(jnp.square(y), axis=-1, keepdims=True) for y in (half, beside))
    usable = (square > 0.0) & (square * 64.0 >= other)
    return jnp.where(usable, x / jnp.where(usable, square, 1.0), 0.0)
