"""Layer normalization and RMS normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_te._validation import check_axes, check_float, checked
from jax_te.ops.backend import ambient_backend, backend_for
from jax_te.ops.first_order import why_backend
from jax_te.ops.linear.norm_and_activation import NormSpec
from jax_te.ops.linear.norm_steps import norm_backward
from jax_te.ops.linear.plan import Plan, row_plan
from jax_te.ops.linear.resolve import LinearArgs, check_norm
from jax_te.ops.primitives import Backend
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.sharding import REPLICATED, constrain
from jax_te.typing import Array, BackendName, LogicalAxes


@checked
def layernorm(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    norm: NormSpec = NormSpec(),
    out_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """Return ``(x - mean) / sqrt(var + eps) * scale + bias`` over the last axis, or RMS norm, by ``norm``.

    Statistics and arithmetic are fp32; of an fp64 input fp64.

    Args:
        x: ``[..., h]`` fp32, bf16, fp16 or fp64.
        scale, bias: ``[h]``; the bias may be None and must be for RMS norm.
        norm: kind of norm, its epsilon, and whether the scale is an offset from 1.
        out_axes: logical axes of the result (and of ``x``); required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        Like ``x``. Gradients of scale and bias have their dtypes.

    Raises:
        ValueError: for a scale or bias of another shape.
        TypeError: for an input that is not floating point.

    Source: ``transformer_engine.jax.layernorm.layernorm``; Ba et al. 2016; Zhang and Sennrich 2019.

    >>> import jax.numpy as jnp
    >>> layernorm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2)).round(3).tolist()
    [[-1.0, 1.0]]
    """
    check_float("layernorm", x, scale, bias)
    check_axes("x", x)
    check_norm("layernorm", x.shape[-1], scale, bias, norm)
    plan = row_plan(x.shape, out_axes, out_axes, whole=1)
    chosen = backend_for("layernorm", backend or ambient_backend.value, None, plan.reason, dtype=x.dtype)
    shards = plan.shards(LinearArgs(plan.x_spec, REPLICATED, ()), plan.x_spec)
    args = LinearArgs(x, (scale, bias), ())
    return _layernorm(_Spec(norm, chosen, plan, out_axes), shards, args, None, out_axes)


class _Spec(NamedTuple):
    norm: NormSpec
    backend: Backend
    plan: Plan
    out_axes: LogicalAxes | None

    def constrain(self, x: Array) -> Array:
        """Return ``x`` in the sharding that the call specifies, where the compiler partitions the op."""
        return constrain(x, self.out_axes) if self.plan.constrained else x


def _fwd(spec: _Spec, args: LinearArgs) -> tuple[Array, Any]:
    # Both sides: a norm is elementwise in rows, so that it runs in the sharding that its neighbours have.
    x, (scale, bias) = spec.constrain(args.x), args.norm
    y, stats = spec.backend.norm(x, scale, bias, spec.norm)
    return spec.constrain(y), (x, stats, scale, bias)


def _bwd(spec: _Spec, residuals: Any, dy: Array) -> tuple[LinearArgs, None]:
    dx, dnorm = norm_backward(spec.backend, spec.plan, residuals, spec.constrain(dy), spec.norm)
    return LinearArgs(dx, dnorm, ()), None


_layernorm = sharded_vjp(_fwd, _bwd, name="norm", once=lambda spec: why_backend(spec.backend.NAME))
