"""A router's product in fp32, of operands in bf16 without copies in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.sharding import mark_varying, varying_axes
from jax_te.typing import Array, DTypeLike


def router_logits(x: Array, kernel: Array, dtype: DTypeLike) -> Array:
    """Return ``x @ kernel``, computed in ``dtype``.

    Operands in bf16 are multiplied as they are where ``dtype`` is fp32, which is exact: a product of two numbers of 8
    bits has 16, and tensor cores add up in fp32. So neither the input, which is that of all experts, nor its gradient
    is written in fp32. Others are cast first.

    Args:
        x: ``[..., h]``, tokens.
        kernel: ``[h, e]``.
        dtype: dtype of the product and of the logits.

    Returns:
        Logits ``[..., e]``, in ``dtype``. Gradients of ``x`` and ``kernel`` are computed in it, too.

    Source: ``megatron.core.transformer.moe.moe_utils.router_gating_linear``.

    >>> router_logits(jnp.ones((3, 2), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16), jnp.float32).dtype
    dtype('float32')
    """
    if jnp.dtype(dtype) == jnp.float32 and x.dtype == kernel.dtype == jnp.bfloat16:
        # Within a user's shard_map: JAX sums over its axes the gradient of an operand that does not vary, but not that
        # of a custom_vjp.
        kernel = mark_varying(kernel, varying_axes(x))
        return _product_of_bf16(x, kernel)
    # "highest": a GPU's default for fp32 is TensorFloat-32, whose errors choose other experts.
    return jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision="highest")


@jax.custom_vjp
def _product_of_bf16(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product_of_bf16(x, kernel), (x, kernel)


def _backward(operands: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = operands
    parts = _bf16_parts(g)
    repeated = jnp.stack([kernel] * parts.shape[-2])
    dx = jnp.einsum("...pe,phe->...h", parts, repeated)  # in bf16: rounded once, as it is written
    dkernel = jnp.einsum("...h,...pe->hpe", x, parts, preferred_element_type=jnp.float32)
    return dx, jnp.sum(dkernel, axis=1).astype(kernel.dtype)


_product_of_bf16.defvjp(_forward, _backward)


def _bf16_parts(g: Array) -> Array:
    """Return bf16 arrays ``[..., 3, e]`` whose sum over the three is ``g [..., e]`` in fp32: 3 x 8 bits are its 24.

    A product with ``g`` is the sum of products with the parts, which one GEMM of bf16 computes.
    """
    parts, rest = [], g
    for _ in range(3):
        # Not by a cast to bf16 and back, which XLA leaves out: then the rest would be 0.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return jnp.stack(parts, axis=-2)
