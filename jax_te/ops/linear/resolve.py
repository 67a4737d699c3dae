"""Checks of a linear op's call, and its resolution: once, in the public op, into one frozen spec for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jax_te._validation import check_axes, check_float
from jax_te.errors import QuantizerStateError
from jax_te.ops.backend import OpName, ambient_backend, backend_for
from jax_te.ops.first_order import why_backend, why_quantized
from jax_te.ops.linear.norm_and_activation import Activation, NormSpec
from jax_te.ops.linear.plan import LinearOptions, Plan, linear_plan, rows_may_be_reordered
from jax_te.ops.linear.spec import LinearSpec, LinearWeights, OpSpec, resolved_sink
from jax_te.ops.primitives import Backend
from jax_te.ops.sharded_vjp import Shards
from jax_te.quantize import (
    ROLES,
    OpaqueTree,
    Precision,
    QuantizedKernel,
    Quantizer,
    ambient_observer,
    check_gradients_merge,
    check_state,
    precision_of,
    scales_are_frozen,
)
from jax_te.recipe import Recipe
from jax_te.sharding import REPLICATED, Dims
from jax_te.typing import Array, BackendName, DTypeLike


class LinearArgs(NamedTuple):
    """The differentiated arguments of every linear op: input, the norm's scale and bias, and each layer's arrays."""

    x: Any
    norm: Any
    layers: tuple[LinearWeights, ...]


class Layer(NamedTuple):
    """One linear layer of a call: its label in messages, the shape of its input, its arrays and its options."""

    label: str
    x_shape: tuple[int, ...]
    weights: LinearWeights
    options: LinearOptions

    @property
    def stored_quantized(self) -> bool:
        """Whether the kernel was quantized before the call."""
        return isinstance(self.weights.kernel, QuantizedKernel)


class Norm(NamedTuple):
    """The norm before the first layer, and its arrays ``[h]``."""

    spec: NormSpec
    scale: Array
    bias: Array | None


def run_op(
    op: Callable[..., Any],
    name: OpName,
    x: Array,
    layers: Sequence[Layer],
    *,
    norm: Norm | None = None,
    activation: Activation | None = None,
    recipe: Recipe | None,
    backend: BackendName | None,
) -> Array:
    """Return the result of a linear op, after its call was checked and resolved.

    Args:
        op: op that `jax_te.ops.sharded_vjp.sharded_vjp` made, over an `OpSpec` and `LinearArgs`.
        name: name of the op, see `jax_te.ops.explain_backend`.
        x: the input.
        layers: one or two layers, in order; where the devices cannot run one, the compiler partitions both.
        norm, activation: norm before the first layer, and activation function between the two.
        recipe, backend: recipe and backend of the call.

    Raises:
        ValueError, TypeError, QuantizerStateError, BackendUnavailableError: see `jax_te.ops.dense`.
    """
    check_axes("x", x)
    precision = precision_of(recipe)
    _check_arrays(name, x, layers, norm)
    if norm is not None:
        _check_no_input_is_saved(layers)
    weights = [usable_weights(layer.weights, precision, recipe) for layer in layers]
    plans = _plans(layers, weights, norm, activation, precision)
    asked = backend or ambient_backend.value
    chosen = backend_for(name, asked, recipe, plans[0].reason, _stored(weights), dtype=x.dtype)
    resolved = [
        _resolved_layer(layer, plan, precision, chosen, x.dtype) for layer, plan in zip(layers, plans, strict=True)
    ]
    specs, sinks = zip(*resolved, strict=True)
    args = LinearArgs(x, None if norm is None else (norm.scale, norm.bias), tuple(weights))
    spec = OpSpec(specs, None if norm is None else norm.spec, activation)
    return op(spec, _shards(specs, weights), args, sinks, layers[-1].options.out_axes)


@runtime_checkable
class SpecOfLayers(Protocol):
    """The static part of an op of linear layers, such as `OpSpec`."""

    @property
    def layers(self) -> Sequence[LinearSpec]: ...


@runtime_checkable
class ArgsOfLayers(Protocol):
    """The arrays of an op of linear layers, such as `LinearArgs`, or bools in their places."""

    @property
    def layers(self) -> Sequence[LinearWeights]: ...


def check_differentiated(
    spec: SpecOfLayers, args: ArgsOfLayers, perturbed: ArgsOfLayers, sinks: tuple[Any, ...]
) -> None:
    """Raise for a derivative that would be wrong.

    Args:
        spec: the op's static part.
        args: the op's arrays.
        perturbed: whether each of them is differentiated.
        sinks: sinks of the call.

    Raises:
        TypeError: if a kernel that was quantized before the call is differentiated and has no ``grad_sink``.
        QuantizerStateError: if state is left out, which then never changes: gradients underflow under its scales; or
            if its gradients would be added.
    """
    for layer, weights, differentiated in zip(spec.layers, args.layers, perturbed.layers, strict=True):
        if layer.stored_quantized and layer.sink is None and any(jax.tree.leaves(differentiated.kernel)):
            raise TypeError(
                "a quantized kernel has no gradient: its values are FP8 or FP4. Differentiate with make_train_step, "
                "which takes the gradient of the fp32 masters, or keep kernels out of what you differentiate"
            )
        fixed = layer.precision.amax_rule is None or layer.frozen_scales or layer.options.evaluation
        if not fixed and not all(jax.tree.leaves(differentiated.state)):
            raise QuantizerStateError(_LEFT_OUT.format(layer.precision.recipe_name))
        check_gradients_merge(weights.state, differentiated.state)


def why_once(spec: SpecOfLayers) -> str | None:
    """Return the reason why a linear op has no second derivatives; None if it has them."""
    for layer in spec.layers:
        operands = [layer.precision.of(role) for role in ROLES]
        if any(operand.quantizer is not None and operand.read_quantized for operand in operands):
            return why_quantized(layer.precision.recipe_name or "")
    return why_backend(spec.layers[0].backend.NAME)


_LEFT_OUT = (
    "a derivative under recipe {!r} leaves the quantizer state out, whose gradient is its next value: the scales would "
    "never change. For an NNX model these two lines write it back, in place of nnx.value_and_grad:\n"
    "    from jax_te import value_and_grad\n"
    "    loss, grads = value_and_grad(loss_fn)(model)\n"
    "For Linen take jax_te.linen.value_and_grad, with the state in its first argument; for functions differentiate the "
    "state with the rest, as jax_te.quantize.with_max_gradients gives it, and make the next one by write_back. For "
    "inference call model.eval(); if the scales are to stay, say so: `with jax_te.quantize.frozen_scales():`"
)


def usable_weights(given: LinearWeights, precision: Precision, recipe: Recipe | None) -> LinearWeights:
    """Return the arrays of a layer as a call under ``recipe`` reads them, without the ``grad_sink``.

    Raises:
        ValueError: if the kernel was quantized for another recipe.
        QuantizerStateError: if the recipe has state, and none is given or its histories have another length.
    """
    kernel, bias, state, _ = given
    if precision.amax_rule is not None:
        check_state(state, recipe)  # type: ignore[arg-type]  # only delayed scaling has the rule
    if isinstance(kernel, QuantizedKernel):
        # Equal quantizers, not equal recipes: recipes may differ in what they do to the other operands.
        if (quantizer := precision.kernel.quantizer) is None:
            kernel = kernel.dequantize()
        elif quantizer != kernel.quantizer:
            raise ValueError(
                f"the kernel was quantized with {kernel.quantizer}, and the recipe of this call needs {quantizer}. "
                "Quantize it again under this recipe (is_first_microbatch=True, or quantize_parameters)"
            )
    return LinearWeights(kernel, bias, state)


def check_norm(op: str, hidden: int, scale: Array, bias: Array | None, norm: NormSpec) -> None:
    """Raise ValueError unless scale (and bias) are ``[h]`` and the bias is there for layer norm only."""
    shapes = scale.shape, None if bias is None else bias.shape
    if shapes not in (((hidden,), (hidden,)), ((hidden,), None)):
        raise ValueError(
            f"{op}: the norm's scale and bias must have shape ({hidden},), the last axis of x, got {shapes}"
        )
    if norm.kind == "rmsnorm" and bias is not None:
        raise ValueError(f"{op}: RMS norm has no bias; pass None, or NormSpec(kind='layernorm')")


def _check_arrays(name: str, x: Array, layers: Sequence[Layer], norm: Norm | None) -> None:
    """Raise for a norm's arrays of another shape, and for arrays of an unsupported dtype."""
    if norm is not None:
        check_norm(name, x.shape[-1], norm.scale, norm.bias, norm.spec)
    arrays: list[Any] = [x] if norm is None else [x, norm.scale, norm.bias]
    for layer in layers:
        arrays += [layer.weights.kernel, layer.weights.bias]
    check_float(name, *arrays)


def _check_no_input_is_saved(layers: Sequence[Layer]) -> None:
    """Raise ValueError for ``save_original_input`` of a layer behind a norm or an activation."""
    for layer in layers:
        if layer.options.save_original_input:
            raise ValueError(
                f"{layer.label}: save_original_input must be False: the GEMM's input is computed inside of the op, and "
                "nothing else keeps it. Leave it off, or call the norm and dense one by one"
            )


def _stored(weights: Sequence[LinearWeights]) -> Quantizer | None:
    """Return the quantizer of kernels that were stored quantized, as plain arrays; None: all are exact, or cached."""
    kernels = [each.kernel for each in weights if isinstance(each.kernel, QuantizedKernel)]
    return next((kernel.quantizer for kernel in kernels if not kernel.is_opaque), None)


def _plans(
    layers: Sequence[Layer],
    weights: Sequence[LinearWeights],
    norm: Norm | None,
    activation: Activation | None,
    precision: Precision,
) -> list[Plan]:
    """Return the plans of a call's layers; one region runs the whole op, so a reason against one layer applies to
    both."""
    plans = [
        linear_plan(layer.x_shape, used.kernel, layer.options, precision, used.state)
        for layer, used in zip(layers, weights, strict=True)
    ]
    first, last = plans[0], plans[-1]
    reason = first.reason or last.reason
    # A norm's statistics are of whole rows.
    if norm is not None and first.contracting_axes:
        reason = f"the norm's input is split along its features, {first.x_spec}"
    if reason is not None:
        return [plan.without_mesh(reason) for plan in plans]
    one_scale = all(precision.of(role).one_scale for role in ROLES)
    if activation is not None and one_scale and rows_may_be_reordered(first, last):
        return [plan.by_rows() for plan in plans]
    return plans


def _resolved_layer(
    layer: Layer, plan: Plan, precision: Precision, backend: Backend, x_dtype: DTypeLike
) -> tuple[LinearSpec, Array | OpaqueTree | None]:
    """Return a layer as the op runs it, and the arrays of its sink; raises as `_check_layer`."""
    (kernel, bias, _, given_sink), options = layer.weights, layer.options
    unpadded_rows = _unpadded_rows(layer, plan, precision)
    _check_layer(layer, plan, precision, unpadded_rows)
    sink = resolved_sink(given_sink, plan, kernel, options.kernel_axes)
    spec = LinearSpec(
        backend=backend,
        precision=precision,
        plan=plan,
        options=options,
        x_dtype=x_dtype,
        wgrad_dtype=sink.wgrad_dtype,
        kernel_rank=kernel.ndim,
        unpadded_rows=unpadded_rows,
        stored_quantized=layer.stored_quantized,
        bias_dtype=None if bias is None else bias.dtype,
        kernel_all_gather=_kernel_all_gather(layer, plan, precision),
        saves_original=_saves_original(options, precision),
        sink=sink.kind,
        observer=ambient_observer.value,
        frozen_scales=scales_are_frozen.value,
    )
    return spec, sink.arrays


def _unpadded_rows(layer: Layer, plan: Plan, precision: Precision) -> tuple[int, ...] | None:
    """Return the shape of the rows of a device's GEMMs, if zeros are appended to them; else None."""
    rows = layer.x_shape[:-1] if plan.rows is None else plan.rows
    # FP8 tensor cores read 16 bytes at once, also along the tokens; an empty tensor has no maximum.
    return rows if prod(rows) == 0 or prod(rows) % precision.alignment else None


def _check_layer(layer: Layer, plan: Plan, precision: Precision, unpadded_rows: tuple[int, ...] | None) -> None:
    """Raise ValueError for shapes or options that do not fit each other, the recipe or the mesh."""
    label, shape, (kernel, bias, state, _), options = layer
    if kernel.ndim < 2 or shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"{label}: input {shape} and kernel {kernel.shape} do not go together; they must be [..., k] and [k, *n]"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"{label}: bias {bias.shape} must have the kernel's output shape {kernel.shape[1:]}")
    if plan.reason is not None and isinstance(kernel, QuantizedKernel) and kernel.is_per_device:
        raise ValueError(
            f"{label}: its kernel was quantized on each device of a mesh, and here the devices cannot run it by "
            f"themselves: {plan.reason}. Take another size, or quantize it where it is used (is_first_microbatch=None)"
        )
    sizes = {"input size": shape[-1], "output size": prod(kernel.shape[1:])}
    if unpadded_rows is not None and state is not None and state["x"]["scale"].ndim:
        # Padding would move the parts.
        sizes["token count (with a scale for each part of the batch)"] = prod(unpadded_rows)
    for name, size in sizes.items():
        if size % precision.alignment:
            raise precision.misfit(label, name, size, f"input {shape}, kernel {kernel.shape}")
    if options.save_original_input and precision.amax_rule is not None:
        raise ValueError(
            f"{label}: save_original_input quantizes the input again in backward, which would see another scale under "
            "DelayedScaling; use Float8CurrentScaling or a block recipe, or leave it off"
        )


def _kernel_all_gather(layer: Layer, plan: Plan, precision: Precision) -> Dims:
    """Return the mesh axes along which a call all-gathers the kernel."""
    # A kernel stored in blocks was all-gathered when it was quantized.
    in_blocks = layer.stored_quantized and not precision.kernel.one_scale
    return () if in_blocks else plan.kernel_all_gather


def _saves_original(options: LinearOptions, precision: Precision) -> bool:
    """Return whether the input itself is the residual: where the kernel gradient's GEMM reads its quantized values."""
    wgrad_is_quantized = precision.x.quantizer is not None and not precision.runs_unquantized("wgrad")
    return options.save_original_input and wgrad_is_quantized


def _shards(layers: Sequence[LinearSpec], weights: Sequence[LinearWeights]) -> Shards | None:
    """Return the sharding of a call's arrays on the mesh; None without a mesh."""
    first, last = layers[0].plan, layers[-1].plan
    if first.mesh is None:
        return None
    given, plain, per_device = [], [], first.per_device
    for layer, (kernel, *_) in zip(layers, weights, strict=True):
        spec: Any = layer.plan.kernel_spec
        plain.append(LinearWeights(spec, layer.plan.bias_spec, REPLICATED))  # type: ignore[arg-type]
        stored = isinstance(kernel, QuantizedKernel)
        given.append(
            plain[-1]._replace(kernel=kernel.partition_specs(spec, per_device, REPLICATED) if stored else spec)
        )
    args = LinearArgs(first.x_spec, REPLICATED, tuple(given))
    cotangents = args._replace(layers=tuple(plain))
    sinks = tuple(None if layer.sink is None else layer.sink.spec(layer.plan) for layer in layers)
    return Shards(mesh=first.mesh, args=args, out=last.out_spec, cotangents=cotangents, sinks=sinks)
