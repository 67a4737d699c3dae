"""Activation functions, plain and gated."""

from __future__ import annotations

import functools

import jax

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.spec import activation_parts
from jax_te.parallel import auto_region
from jax_te.typing import Array, LogicalAxes


def activation(
    x: Array, name: str, *, out_axes: LogicalAxes | None = None, backend: BackendName | None = None
) -> Array:
    """The product of the named functions of each component of ``x``.

    Args:
        x: ``[..., n_act, f]``, fp32, bf16 or fp16; computed in fp32.
        name: a key of `jax_te.config.ACTIVATIONS`: ``"gelu"`` (tanh form), ``"relu"``, ``"silu"``, or the gated
            ``"geglu"``, ``"reglu"``, ``"swiglu"``, where the first component is activated and the second multiplies
            it.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        ``[..., f]`` in the dtype of ``x``.

    Source: ``transformer_engine.jax.activation.activation``.

    >>> import jax.numpy as jnp
    >>> activation(jnp.array([[-1.0, 2.0]]), "relu").tolist()
    [0.0, 2.0]
    """
    parts = len(activation_parts(name))
    if x.ndim < 2 or x.shape[-2] != parts:
        raise ValueError(f"activation: x must be [..., {parts}, f] for {name!r}, got {x.shape}")
    chosen = select("activation", backend=backend)
    return auto_region(functools.partial(_activation, chosen, name), out_axes)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activation(backend: str, name: str, x: Array) -> Array:
    return primitives(backend).act(x, name)


def _forward(backend: str, name: str, x: Array) -> tuple[Array, Array]:
    return primitives(backend).act(x, name), x


def _backward(backend: str, name: str, x: Array, dz: Array) -> tuple[Array]:
    return (primitives(backend).act_backward(dz, x, name),)


_activation.defvjp(_forward, _backward)
