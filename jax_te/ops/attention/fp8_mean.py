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
    # [b, s, n, 2, dv / 2]
    halves = do.values().astype(jnp.float32).reshape(*do.shape[:-1], 2, -1)
    output = out.astype(jnp.float32).reshape(halves.shape)
    total = _sum_of_row(output * halves)
    square = jnp.sum(jnp.square(halves), axis=-1, keepdims=True)
    # The half with the larger values carries the sum, as a multiple of itself: of all vectors with this sum the
    # shortest. The rounding of its codes leaves about one part in 200 out.
    leads = jnp.arange(2).reshape(1, 1, 1, 2, 1) == jnp.argmax(square, axis=-2, keepdims=True)
    top = jnp.max(square, axis=-2, keepdims=True)
    weight = _ratio(total, top, top > 0.0)
    # A power of two, so that codes do not depend on which rows have one scale, as on a mesh.
    largest = amax(weight * jnp.max(jnp.where(leads, jnp.abs(halves), 0.0), axis=(-2, -1), keepdims=True))
    scale = power_of_two_scale(largest, precision.dtype)
    carried = precision.quantize(jnp.where(leads, weight * halves, 0.0), scale)
    # The other half carries what is missing as exactly, so that both are closer than an output in bf16. Not where it is
    # so small that this would take larger values than the scale is for.
    missing = total - _sum_of_row(carried.values().astype(jnp.float32) * halves)
    usable = ~leads & (square > 0.0) & (square * 64.0 >= top)
    rest = precision.quantize(_ratio(missing, square, usable) * halves, scale)
    data = jnp.where(leads, carried.data, rest.data).reshape(do.shape)
    return QuantizedTensor(data=data, scale_inv=carried.scale_inv, dtype=out.dtype)


def _sum_of_row(x: Array) -> Array:
    return jnp.sum(x, axis=(-2, -1), keepdims=True)


def _ratio(x: Array, y: Array, where: Array) -> Array:
    """Return ``x / y``, and 0 elsewhere."""
    return jnp.where(where, x / jnp.where(where, y, 1.0), 0.0)
