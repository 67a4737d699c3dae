"""Layer normalization and RMS normalization."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.linear.row_ranks import RowRanks, row_ranks
from jax_te.ops.linear.spec import NormSpec
from jax_te.sharding import auto_region, constrain
from jax_te.sharding.internal import PER_RANK, WHOLE, on_ranks, place, reduce_sum
from jax_te.typing import Array, LogicalAxes


def check_norm(op: str, hidden: int, scale: Array, bias: Array | None, norm: NormSpec) -> None:
    """Raise ValueError unless scale (and bias) are ``[h]`` and the bias is there for layer norm only."""
    if scale.shape != (hidden,) or (bias is not None and bias.shape != (hidden,)):
        raise ValueError(
            f"{op}: the norm's scale and bias must have shape ({hidden},), got {scale.shape}"
            f"{'' if bias is None else f' and {bias.shape}'}"
        )
    if norm.kind == "rmsnorm" and bias is not None:
        raise ValueError(f"{op}: RMS norm has no bias; pass None, or NormSpec(kind='layernorm')")


def layernorm(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    norm: NormSpec = NormSpec(),
    out_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``(x - mean) / sqrt(var + eps) * scale + bias`` over the last axis, or RMS norm, by ``norm``.

    Statistics and arithmetic are fp32.

    Args:
        x: ``[..., h]`` fp32, bf16 or fp16.
        scale, bias: ``[h]``; the bias may be None and must be for RMS norm.
        norm: which norm, its epsilon, and whether the scale is an offset from 1.
        out_axes: logical axes of the result (and of ``x``); required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        Like ``x``. Gradients of scale and bias have their dtypes.

    Source: ``transformer_engine.jax.layernorm.layernorm``; Ba et al. 2016; Zhang and Sennrich 2019.

    >>> import jax.numpy as jnp
    >>> layernorm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2)).round(3).tolist()
    [[-1.0, 1.0]]
    """
    check_norm("layernorm", x.shape[-1], scale, bias, norm)
    ranks = row_ranks(x.shape, out_axes, whole=1)
    chosen = select("layernorm", backend=backend, ranks=ranks)
    spec = _Spec(norm=norm, backend=chosen, out_axes=out_axes, ranks=ranks if isinstance(ranks, RowRanks) else None)
    if spec.ranks is None:
        return auto_region(functools.partial(_layernorm, spec), out_axes)(x, scale, bias)
    scale, bias = place((scale, bias), WHOLE, spec.ranks.mesh)
    return _layernorm(spec, place(x, spec.ranks.rows, spec.ranks.mesh), scale, bias)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    norm: NormSpec
    backend: str
    out_axes: LogicalAxes | None
    ranks: RowRanks | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm(spec: _Spec, x: Array, scale: Array, bias: Array | None) -> Array:
    return _forward(spec, x, scale, bias)[0]


def _forward(spec: _Spec, x: Array, scale: Array, bias: Array | None) -> tuple[Array, tuple[Any, ...]]:
    ranks = spec.ranks
    if ranks is None:
        y, saved = _run(spec, constrain(x, spec.out_axes), scale, bias)
    else:
        layouts = (ranks.rows, WHOLE, WHOLE)
        y, saved = on_ranks(_run, spec, ranks.mesh, layouts, (ranks.rows, PER_RANK), (x, scale, bias))
    return checkpoint_name(constrain(y, spec.out_axes), "norm"), (saved, scale, bias)


def _run(spec: _Spec, x: Array, scale: Array, bias: Array | None) -> tuple[Array, Any]:
    y, stats = primitives(spec.backend).norm(x, scale, bias, spec.norm)
    return y, (x, stats)


def _backward(spec: _Spec, kept: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    saved, scale, bias = kept
    ranks = spec.ranks
    if ranks is None:
        return _run_backward(spec, saved, scale, bias, constrain(dy, spec.out_axes))
    layouts = (PER_RANK, WHOLE, WHOLE, ranks.rows)
    return on_ranks(_run_backward, spec, ranks.mesh, layouts, (ranks.rows, WHOLE, WHOLE), (saved, scale, bias, dy))


def _run_backward(spec: _Spec, saved: Any, scale: Array, bias: Array | None, dy: Array) -> tuple[Any, ...]:
    dx, *dnorm = primitives(spec.backend).norm_backward(dy, *saved, scale, bias, spec.norm)
    axes = () if spec.ranks is None else spec.ranks.rows.axes
    return dx, *(None if gradient is None else reduce_sum(gradient, axes) for gradient in dnorm)


_layernorm.defvjp(_forward, _backward)
