"""Activation functions, plain and gated."""

from __future__ import annotations

import functools

import jax

from jax_te.config import ActivationParams
from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.spec import activation_parts, check_activation_params
from jax_te.parallel import auto_region
from jax_te.typing import Array, LogicalAxes


def activation(
    x: Array,
    name: str,
    *,
    params: ActivationParams | None = None,
    out_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """The product of the named functions of each component of ``x``.

    With one component, ``n_act = 1``:

    - ``"gelu"``: GELU in its tanh form; ``"qgelu"``: ``x sigmoid(1.702 x)``;
    - ``"relu"``: ``max(x, 0)``; ``"srelu"``: its square;
    - ``"silu"``: ``x sigmoid(x)``.

    With two, where the second multiplies a function of the first: ``"geglu"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``,
    ``"swiglu"`` (SiLU), ``"glu"`` (the sigmoid) and ``"clamped_swiglu"``, see `jax_te.config.ActivationParams`.

    Args:
        x: ``[..., n_act, f]``, fp32, bf16 or fp16; computed in fp32.
        name: a key of `jax_te.config.ACTIVATIONS`.
        params: of ``"clamped_swiglu"``. None: ``ActivationParams()``.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        ``[..., f]`` in the dtype of ``x``.

    Raises:
        ValueError: for an unknown name, another number of components, or parameters of an activation that has none.

    Source: ``transformer_engine.jax.activation.activation``; Shazeer 2020 (with two components); So et al. 2021
    (``srelu``).

    >>> import jax.numpy as jnp
    >>> activation(jnp.array([[-1.0, 2.0]]), "relu").tolist()
    [0.0, 2.0]
    """
    parts = len(activation_parts(name))
    if x.ndim < 2 or x.shape[-2] != parts:
        raise ValueError(f"activation: x must be [..., {parts}, f] for {name!r}, got {x.shape}")
    check_activation_params(name, params)
    chosen = select("activation", backend=backend)
    return auto_region(functools.partial(_activation, chosen, name, params), out_axes)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _activation(backend: str, name: str, params: ActivationParams | None, x: Array) -> Array:
    return primitives(backend).act(x, name, params)


def _forward(backend: str, name: str, params: ActivationParams | None, x: Array) -> tuple[Array, Array]:
    return primitives(backend).act(x, name, params), x


def _backward(backend: str, name: str, params: ActivationParams | None, x: Array, dz: Array) -> tuple[Array]:
    return (primitives(backend).act_backward(dz, x, name, params),)


_activation.defvjp(_forward, _backward)
