"""Activation functions, plain and gated."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.config import ActivationParams
from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.linear.row_ranks import RowRanks, row_ranks
from jax_te.ops.linear.spec import activation_parts, check_activation_params
from jax_te.sharding import auto_region
from jax_te.sharding.internal import Layout, on_ranks, place
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
    axes = None if out_axes is None else (*out_axes[:-1], "components", out_axes[-1])
    ranks = row_ranks(x.shape, axes, whole=0)
    chosen = select("activation", backend=backend, ranks=ranks)
    spec = _Spec(backend=chosen, name=name, params=params, ranks=ranks if isinstance(ranks, RowRanks) else None)
    if spec.ranks is None:
        return auto_region(functools.partial(_activation, spec), out_axes)(x)
    return _activation(spec, place(x, spec.ranks.rows, spec.ranks.mesh))


@dataclass(frozen=True, kw_only=True)
class _Spec:
    backend: str
    name: str
    params: ActivationParams | None
    ranks: RowRanks | None

    @property
    def out(self) -> Layout:
        """Layout of the result."""
        assert self.ranks is not None
        *lead, _, last = self.ranks.rows.dims
        return Layout((*lead, last))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activation(spec: _Spec, x: Array) -> Array:
    return _forward(spec, x)[0]


def _forward(spec: _Spec, x: Array) -> tuple[Array, Array]:
    ranks = spec.ranks
    y = _run(spec, x) if ranks is None else on_ranks(_run, spec, ranks.mesh, (ranks.rows,), spec.out, (x,))
    return checkpoint_name(y, "activation"), x


def _run(spec: _Spec, x: Array) -> Array:
    return primitives(spec.backend).act(x, spec.name, spec.params)


def _backward(spec: _Spec, x: Array, dz: Array) -> tuple[Array]:
    ranks = spec.ranks
    if ranks is None:
        return (_run_backward(spec, x, dz),)
    return (on_ranks(_run_backward, spec, ranks.mesh, (ranks.rows, spec.out), ranks.rows, (x, dz)),)


def _run_backward(spec: _Spec, x: Array, dz: Array) -> Array:
    return primitives(spec.backend).act_backward(dz, x, spec.name, spec.params)


_activation.defvjp(_forward, _backward)
