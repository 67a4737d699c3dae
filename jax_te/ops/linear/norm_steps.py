"""The norm in front of a linear layer: its output as an operand of the GEMMs, and its gradients."""

from __future__ import annotations

from typing import Any

from jax_te.ops.linear import gemms
from jax_te.ops.linear.gemms import Operand
from jax_te.ops.linear.norm_and_activation import NormSpec
from jax_te.ops.linear.plan import Plan
from jax_te.ops.linear.spec import LinearSpec
from jax_te.ops.primitives import Backend
from jax_te.quantize import GemmState
from jax_te.sharding import reduce_sum
from jax_te.typing import Array


def normed_operand(
    spec: LinearSpec, norm: NormSpec, x: Array, scale: Array, bias: Array | None, state: GemmState | None
) -> tuple[Operand, Any]:
    """Return the norm's output as a GEMM operand, and the statistics that backward needs."""
    how = gemms.fused_quantization(spec, state, "x")
    if how is None:
        y, stats = spec.primitives.norm(x, scale, bias, norm)
        return gemms.make_operand(spec, "x", y, state, axis=-1), stats
    written, stats, amax = spec.primitives.norm_quantize(x, scale, bias, norm, how)
    return gemms.adopt(spec, "x", written, (how.scale, amax)), stats


def norm_backward(
    backend: Backend, plan: Plan, residuals: Any, dy: Array, norm: NormSpec
) -> tuple[Array, tuple[Array, Array | None]]:
    """Return the gradients of a norm's input and of ``(scale, bias)``, the latter summed over all devices' rows.

    Args:
        backend: primitives of the op.
        plan: mesh of the op, or of its first layer.
        residuals: the norm's input, its statistics, scale and bias.
        dy: gradient of the norm's output.
        norm: static description of the norm.
    """
    x, stats, scale, bias = residuals
    dx, dscale, dbias = backend.norm_backward(dy, x, stats, scale, bias, norm)
    if plan.mesh is not None:
        dscale = reduce_sum(dscale, plan.x_row_axes)
        dbias = None if dbias is None else reduce_sum(dbias, plan.x_row_axes)
    return dx, (dscale, dbias)
