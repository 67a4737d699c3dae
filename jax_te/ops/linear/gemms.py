"""The three GEMMs of a linear layer and the quantization of their operands, as functions over explicit residuals.

Every op with a linear layer is composed of these. On a mesh they run on one device's shards: an operand with one scale
is quantized as a shard, under the amax of the shards that share it, and all-gathered in FP8; other operands are
all-gathered first, so that no block of scales spans two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.linear.spec import KernelGemm, LinearSpec, LinearWeights
from jax_te.ops.overflow import show_overflow
from jax_te.quantize import ROLES, Gemm, GemmState, Quantization, QuantizedKernel, TensorRole, pad_rows, unpad_rows
from jax_te.sharding import all_gather, constrain, reduce_max, reduce_sum
from jax_te.typing import Array

Used = tuple[Array | None, Array | None]
"""Scale with which an operand was quantized, and the amax seen, from which the next state is computed."""


class Operand(NamedTuple):
    """One tensor as a GEMM operand: unquantized, quantized, or both; and the scale and amax of its quantization."""

    unquantized: Any = None
    quantized: Any = None
    used: Used = (None, None)

    def read_by(self, spec: LinearSpec, gemm: Gemm) -> Any:
        """Return the form that one GEMM reads."""
        if self.quantized is None or spec.precision.runs_unquantized(gemm):
            return self.unquantized
        return self.quantized

    def map(self, fn: Callable[[Any], Any]) -> Operand:
        """Return the operand with ``fn`` applied to the forms that it has."""
        unquantized = None if self.unquantized is None else fn(self.unquantized)
        return Operand(unquantized, None if self.quantized is None else fn(self.quantized), self.used)


class LinearResiduals(NamedTuple):
    """Residuals of one linear layer's forward pass.

    Args:
        x: the input, as the kernel gradient's GEMM reads it: an array, a `QuantizedTensor`, or a backend's own form.
        kernel: the kernel, as the input gradient's GEMM reads it; on a mesh this device's shard of it.
        x_used: scale and amax of the input.
        kernel_used: scale and amax of the kernel.
        state: the recipe's state.
    """

    x: Any
    kernel: Any
    x_used: Used
    kernel_used: Used
    state: GemmState | None


def quantization(spec: LinearSpec, state: GemmState | None, role: TensorRole) -> Quantization:
    """Return the quantization of an operand of this layer."""
    precision, plan = spec.precision, spec.plan
    scale = None if precision.amax_rule is None else precision.scale(state, role)
    axes = None if plan.scale_axes is None else plan.scale_axes[ROLES.index(role)]
    return Quantization(precision.of(role).quantizer, scale, axes)


def fused_quantization(spec: LinearSpec, state: GemmState | None, role: TensorRole) -> Quantization | None:
    """Return the quantization that the op which computes this tensor can fuse; None if something else reads its values.

    On a mesh a tensor that is all-gathered before its quantization does not qualify; nor does one that is padded with
    rows of zeros, which a norm's bias or an activation would change.
    """
    precision = spec.precision.of(role)
    dims = spec.plan.gathered(role)
    gets_rows = spec.unpadded_rows is not None
    is_quantized = precision.quantizer is not None
    # A fused kernel writes quantized values only: statistics, GEMMs in high precision, `show_overflow` and an
    # all-gather in front of the quantization need the tensor itself.
    values_are_read = (
        spec.observer is not None
        or precision.read_unquantized
        or spec.x_dtype == jnp.float16
        or (bool(dims) and not precision.one_scale)
    )
    return None if gets_rows or (is_quantized and values_are_read) else quantization(spec, state, role)


def adopt(spec: LinearSpec, role: TensorRole, written: Any, used: Used) -> Operand:
    """Return the operand of a tensor that its op wrote quantized (see `fused_quantization`), all-gathered."""
    dims = spec.plan.gathered(role)
    if dims:
        written = spec.primitives.all_gather_operand(written, dims)
    unquantized = spec.precision.of(role).quantizer is None
    return Operand(unquantized=written, used=used) if unquantized else Operand(quantized=written, used=used)


def make_operand(spec: LinearSpec, role: TensorRole, x: Any, state: GemmState | None, *, axis: int) -> Operand:
    """Return the input or the output's gradient as an operand, all-gathered.

    Args:
        spec: the layer.
        role: ``"x"`` or ``"grad"``.
        x: the tensor; on a mesh this device's shard. Or a tree of arrays, whatever else the spec's backend quantizes.
        state: the recipe's state.
        axis: axis with which the rows of its matrix view end.
    """
    dims = spec.plan.gathered(role)
    if not dims:
        return _quantized(spec, role, x, state, axis=axis)
    if not spec.precision.of(role).one_scale or spec.unpadded_rows is not None:
        # Blocks of the whole tensor's rows may begin inside of a shard; padding rows are added after all of a device's.
        return _quantized(spec, role, all_gather(x, dims), state, axis=axis)
    # FP8 moves half of bf16's bytes, and each device quantizes its shard alone, not the whole tensor again.
    shard = _quantized(spec, role, x, state, axis=axis)
    return shard.map(lambda form: spec.primitives.all_gather_operand(form, dims))


def forward(
    spec: LinearSpec, x: Operand, weights: LinearWeights, original: Array | None = None
) -> tuple[Array, LinearResiduals]:
    """Return the output of a layer that reads ``x``, and its residuals.

    ``original`` is the input itself, for ``save_original_input``; None: it is computed inside of the op.
    """
    assert original is not None or not spec.saves_original
    kernel, residual = kernel_operand(spec, weights.kernel, weights.state)
    y = fprop(spec, x, kernel, weights.bias)
    x_residual = original if spec.saves_original else spec.backend.residual_for_wgrad(x.read_by(spec, "wgrad"))
    return y, LinearResiduals(x_residual, residual, x.used, kernel.used, weights.state)


def backward(
    spec: LinearSpec, residuals: LinearResiduals, g: Operand, dbias: Array | None, *, after: Array
) -> tuple[Array, LinearWeights, Any]:
    """Return the cotangents of a layer's input, arrays and ``grad_sink``.

    Args:
        spec: the layer.
        residuals: residuals of the forward pass.
        g: the gradient of its output.
        dbias: gradient of the bias, on a mesh summed over this device's rows.
        after: the gradient of the op's output.
    """
    dbias = summed_dbias(spec, dbias)
    dx = dgrad(spec, residuals.kernel, g, after=after)
    return dx, *weight_cotangents(spec, residuals, g, dbias)


def summed_dbias(spec: LinearSpec, dbias: Array | None) -> Array | None:
    """Return the bias gradient, summed over the devices that have parts of the rows."""
    if dbias is None or spec.plan.mesh is None:
        return dbias
    return reduce_sum(dbias, spec.plan.out_row_axes)


def weight_cotangents(
    spec: LinearSpec, residuals: LinearResiduals, g: Operand, dbias: Array | None
) -> tuple[LinearWeights, Any]:
    """Return the cotangents of a layer's arrays and ``grad_sink``.

    Args:
        spec, residuals, g: see `backward`.
        dbias: gradient of the bias, of all devices.
    """
    gemm = KernelGemm(spec, residuals.x, g.read_by(spec, "wgrad"), wgrad)
    dsink = None if spec.sink is None else spec.sink.cotangent(gemm)
    # A kernel stored quantized has no gradient itself: the fp32 master's gradient goes to the sink.
    has_gradient = spec.sink is None and not spec.stored_quantized
    dkernel: Any = gemm.gradient() if has_gradient else None
    return LinearWeights(dkernel, dbias, next_state(spec, residuals, g)), dsink


def kernel_operand(spec: LinearSpec, kernel: Array | QuantizedKernel, state: GemmState | None) -> tuple[Operand, Any]:
    """Return the kernel as forward reads it, and its residual: on a mesh the shard, not the all-gathered kernel."""
    dims = spec.kernel_all_gather
    if isinstance(kernel, QuantizedKernel):
        unquantized = None
        # The exact values are gone: GEMMs in high precision read the dequantized values.
        if spec.precision.kernel.read_unquantized:
            unquantized, _ = spec.backend.quantize_operand(kernel.dequantize(), Quantization(), axis=1)
        operand = Operand(unquantized, kernel.operand, (quantization(spec, state, "kernel").scale, kernel.amax))
    elif dims and not spec.precision.kernel.one_scale:
        # The residual is the original shard: the all-gathered kernel would stay in memory until backward.
        return _quantized(spec, "kernel", all_gather(kernel, dims), state, axis=1), kernel
    else:
        if dims and spec.precision.kernel.quantizer is None:
            # Before the all-gather, which then moves the compute dtype's bytes, not those of an fp32 parameter.
            kernel = kernel.astype(spec.x_dtype)
        operand = _quantized(spec, "kernel", kernel, state, axis=1)
    # Taken before the all-gather, so that backward holds a shard and gathers again.
    residual = spec.backend.residual_for_dgrad(operand.read_by(spec, "dgrad"))
    if not dims:
        return operand, residual
    return operand.map(lambda form: spec.backend.all_gather_kernel(form, dims, "fprop")), residual


def fprop(spec: LinearSpec, x: Operand, kernel: Operand, bias: Array | None) -> Array:
    """Return ``x @ kernel + bias``; where the sum over ``k`` is sharded, all-reduced or reduce-scattered."""
    operands = x.read_by(spec, "fprop"), kernel.read_by(spec, "fprop")
    # The bias is added once, after the sum over the devices.
    later = bool(spec.plan.contracting_axes)
    y = spec.backend.gemm_fprop(*operands, None if later else bias, spec.precision.splits_accumulator("fprop"))
    return summed_y(spec, y, bias if later else None)


def summed_y(spec: LinearSpec, y: Array, bias: Array | None) -> Array:
    """Return the output of a layer.

    Args:
        spec: the layer.
        y: output of the GEMM, with its padding, on a mesh of this device's part of ``k``.
        bias: bias, if the GEMM has not added it.
    """
    plan = spec.plan
    y = y if spec.unpadded_rows is None else unpad_rows(y, spec.unpadded_rows)
    if plan.contracting_axes:
        y = reduce_sum(y, plan.contracting_axes, plan.out_reduce_scatter)
    elif plan.constrained:
        y = constrain(y, spec.options.out_axes)
    return y if bias is None else y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))


def grad_operand(spec: LinearSpec, g: Array, state: GemmState | None) -> tuple[Operand, Array | None]:
    """Return the output's gradient as an operand, and the bias gradient, on a mesh of this device's rows."""
    if spec.plan.constrained:
        # Cotangents have no sharding constraint, so the compiler may have sharded them differently.
        g = constrain(g, spec.options.out_axes)
    axis, how = g.ndim - spec.kernel_rank + 1, fused_quantization(spec, state, "grad")
    # The bias gradient sums unquantized values either way, as TE's fused kernel does.
    written, dbias, amax = spec.primitives.quantize_dbias(
        g, how or Quantization(), axis=axis, bias_dtype=spec.bias_dtype
    )
    if how is None:
        return make_operand(spec, "grad", g, state, axis=axis), dbias
    return adopt(spec, "grad", written, (how.scale, amax)), dbias


def dgrad(spec: LinearSpec, kernel: Any, g: Operand, *, after: Array) -> Array:
    """Return the input's gradient.

    Args:
        spec: the layer.
        kernel: residual of the kernel.
        g: the gradient of the output.
        after: the gradient of the op's output.
    """
    dims = spec.kernel_all_gather
    if dims:
        # Without the barrier the compiler would find forward's all-gather equal to this one and keep its result: all
        # kernels of the model would be whole at once.
        kernel, _ = jax.lax.optimization_barrier((kernel, after))
        if spec.precision.kernel.one_scale:
            kernel = spec.backend.all_gather_kernel(kernel, dims, "dgrad")
        else:
            # No state: recipes with state (delayed scaling) have one scale.
            kernel = spec.backend.residual_for_dgrad(kernel_operand(spec, kernel, None)[0].read_by(spec, "dgrad"))
    dx = spec.backend.gemm_dgrad(g.read_by(spec, "dgrad"), kernel, spec.precision.splits_accumulator("dgrad"))
    return summed_dx(spec, dx)


def summed_dx(spec: LinearSpec, dx: Array) -> Array:
    """Return the input's gradient without padding, summed over the devices that have parts of the output's features."""
    plan = spec.plan
    dx = dx if spec.unpadded_rows is None else unpad_rows(dx, spec.unpadded_rows)
    return dx if plan.mesh is None else reduce_sum(dx, plan.feature_axes, plan.x_all_gather)


def wgrad(spec: LinearSpec, x: Any, g: Any) -> Array:
    """Return the kernel's gradient in its own sharding.

    Args:
        spec: the layer.
        x: residual of the input.
        g: the gradient of the output, as this GEMM reads it.
    """
    if spec.saves_original:
        # The same bits as forward's, where it was observed: current and block scales depend on the values alone.
        again = make_operand(replace(spec, observer=None), "x", x, None, axis=-1)
        x = spec.backend.residual_for_wgrad(again.read_by(spec, "wgrad"))
    dkernel = spec.backend.gemm_wgrad(x, g, spec.wgrad_dtype, spec.precision.splits_accumulator("wgrad"))
    return summed_dkernel(spec, dkernel)


def summed_dkernel(spec: LinearSpec, dkernel: Array) -> Array:
    """Return the kernel's gradient in its own sharding, summed over the devices that have parts of the rows."""
    if spec.plan.mesh is not None:
        later = () if spec.sink is None else spec.sink.summed_later
        # Reduce-scattered over FSDP's axis, all-reduced over the others: each device keeps the shard that it updates.
        return reduce_sum(dkernel, spec.plan.row_axes, spec.plan.kernel_all_gather, later)
    # The gradient takes the parameter's sharding at once; elsewhere the optimizer would gather one of the two.
    return constrain(dkernel, spec.options.kernel_axes) if spec.plan.constrained else dkernel


def next_state(spec: LinearSpec, residuals: LinearResiduals, grad: Operand) -> GemmState | None:
    """Return the state after a call, with the amaxes of the whole tensors."""
    if residuals.state is None or spec.frozen_scales:
        return residuals.state
    scales, amaxes = zip(residuals.x_used, residuals.kernel_used, grad.used, strict=True)
    # Reduced here, not where each was computed: nothing in this step reads them, and one collective suffices for all
    # three.
    if spec.plan.mesh is not None and spec.precision.amax_rule is not None:
        # None is not a leaf: an operand that no GEMM read quantized has no amax.
        seen, treedef = jax.tree.flatten(amaxes)
        amaxes = jax.tree.unflatten(treedef, list(reduce_max(jnp.stack(seen), spec.plan.amax_axes)) if seen else [])
    return spec.precision.next_state(residuals.state, dict(zip(ROLES, zip(scales, amaxes, strict=True), strict=True)))


def _quantized(spec: LinearSpec, role: TensorRole, x: Any, state: GemmState | None, *, axis: int) -> Operand:
    """Return ``x``, which is available unquantized, in the forms that the GEMMs read."""
    precision, how = spec.precision.of(role), quantization(spec, state, role)
    unquantized = quantized = seen = None
    if spec.unpadded_rows is not None and role != "kernel":
        x, axis = pad_rows(x, axis, spec.precision.alignment), 1
    if how.quantizer is None or precision.read_unquantized:
        unquantized, _ = spec.backend.quantize_operand(x, Quantization(), axis=axis)
    if how.quantizer is not None and precision.read_quantized:
        if spec.observer is not None:
            spec.observer.record(spec.options.name, role, how.quantizer, spec.backend.statistics(x, how, axis=axis))
        quantized, seen = spec.backend.quantize_operand(jax.tree.map(show_overflow, x), how, axis=axis)
    return Operand(unquantized, quantized, (how.scale, seen))
