"""Checks of a linear op's call, and its resolution: once, in the public op, into one frozen spec for each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax

from jax_te.errors import QuantizerStateError
from jax_te.ops.backend import Backend, ambient_backend, backend_for
from jax_te.ops.linear.plan import UNSHARDED, Plan, linear_plan, norm_plan
from jax_te.ops.linear.spec import LinearOptions, LinearSpec, LinearWeights, NormSpec
from jax_te.ops.sharded_vjp import Shards
from jax_te.quantize import QuantizedKernel
from jax_te.quantize.internal import Precision, ambient_observer, precision_of
from jax_te.recipe import Recipe
from jax_te.sharding.internal import REPLICATED
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


class Call(NamedTuple):
    """A resolved call: each layer's spec and arrays, and where they lie on the mesh."""

    specs: list[LinearSpec]
    weights: tuple[LinearWeights, ...]
    sinks: tuple[Any, ...]
    shards: Shards | None

    def run(self, op: Callable[..., Any], spec: Any, x: Array, norm: tuple[Array, Array | None] | None) -> Array:
        """Return the result of ``op``, made by `jax_te.ops.sharded_vjp.sharded_vjp`."""
        out_axes = self.specs[-1].options.out_axes
        return op(spec, self.shards, LinearArgs(x, norm, self.weights), self.sinks, out_axes)


def resolve_call(
    op: str,
    layers: Sequence[Layer],
    x_dtype: DTypeLike,
    *,
    recipe: Recipe | None,
    backend: BackendName | None,
    behind_norm: bool = False,
) -> Call:
    """Return a linear op's call, checked and resolved.

    Args:
        op: its name, see `jax_te.ops.explain_backend`.
        layers: one or two, one after another; where the devices cannot run one, the compiler partitions both.
        x_dtype: the compute dtype.
        recipe, backend: of the call.
        behind_norm: the first layer reads a norm's output.

    Raises:
        ValueError, QuantizerStateError, BackendUnavailableError: as `jax_te.ops.dense`.
    """
    precision, plans, weights, specs = precision_of(recipe), [], [], []
    sinks: list[Any] = []
    for _, shape, given, options in layers:
        weights.append(usable_weights(given, precision, recipe))
        # Asked here, so that a call without a mesh takes no detour.
        whole = jax.sharding.get_abstract_mesh().empty
        plans.append(UNSHARDED if whole else linear_plan(shape, weights[-1].kernel, options, precision, given.state))
    if behind_norm and plans[0].mesh is not None:
        plans[0] = norm_plan(plans[0])
    if plans[-1].reason is not None:
        plans[0] = plans[0].without_mesh(plans[-1].reason)
    if plans[0].reason is not None:
        plans[-1] = plans[-1].without_mesh(plans[0].reason)
    chosen = backend_for(op, backend or ambient_backend.value, recipe, plans[0].reason)
    for layer, plan in zip(layers, plans, strict=True):
        specs.append(_linear_spec(layer, x_dtype, precision, plan, chosen))
        sinks.append(layer.weights.grad_sink)
    return Call(specs, tuple(weights), tuple(sinks), None if plans[0].mesh is None else _shards(plans, weights))


def check_differentiated(spec: Any, args: LinearArgs, perturbed: LinearArgs, sinks: tuple[Any, ...]) -> None:
    """Raise TypeError if a kernel that was quantized before the call is differentiated and has no ``grad_sink``."""
    for layer, sink, stored in zip(perturbed.layers, sinks, spec.stored_quantized, strict=True):
        if stored and sink is None and any(jax.tree.leaves(layer.kernel)):
            raise TypeError(
                "a quantized kernel has no gradient: its values are FP8 or FP4. Differentiate with make_train_step, "
                "which takes the gradient of the fp32 masters, or keep kernels out of what you differentiate"
            )


def usable_weights(given: LinearWeights, precision: Precision, recipe: Recipe | None) -> LinearWeights:
    """Return the arrays of a layer as a call under ``recipe`` reads them, without the ``grad_sink``.

    Raises:
        ValueError: if the kernel was quantized for another recipe.
        QuantizerStateError: if the recipe has state and none is given.
    """
    kernel, bias, state, _ = given
    if precision.amax_rule is not None and state is None:
        raise QuantizerStateError(
            f"{recipe} needs quantizer state and this layer has none. Build the model inside "
            "`with autocast(recipe):`, or attach state with prepare_quantization(model, recipe)."
        )
    if isinstance(kernel, QuantizedKernel):
        quantizer = precision.kernel.quantizer
        if quantizer is None:
            kernel = kernel.dequantize()
        elif quantizer != kernel.quantizer:
            raise ValueError(
                f"the kernel was quantized with {kernel.quantizer}, and the recipe of this call needs {quantizer}. "
                "Quantize it again under this recipe (is_first_microbatch=True, or quantize_parameters)"
            )
    return LinearWeights(kernel, bias, state)


def check_norm(op: str, hidden: int, scale: Array, bias: Array | None, norm: NormSpec) -> None:
    """Raise ValueError unless scale (and bias) are ``[h]`` and the bias is there for layer norm only."""
    if scale.shape != (hidden,) or (bias is not None and bias.shape != (hidden,)):
        raise ValueError(
            f"{op}: the norm's scale and bias must have shape ({hidden},), got {scale.shape}"
            f"{'' if bias is None else f' and {bias.shape}'}"
        )
    if norm.kind == "rmsnorm" and bias is not None:
        raise ValueError(f"{op}: RMS norm has no bias; pass None, or NormSpec(kind='layernorm')")


def _linear_spec(layer: Layer, x_dtype: DTypeLike, precision: Precision, plan: Plan, backend: Backend) -> LinearSpec:
    label, shape, (kernel, bias, _, sink), options = layer
    stored = isinstance(kernel, QuantizedKernel)
    if kernel.ndim < 2 or shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"{label}: input {shape} and kernel {kernel.shape} do not go together; they must be [..., k] and [k, *n]"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"{label}: bias {bias.shape} must have the kernel's output shape {kernel.shape[1:]}")
    if plan.reason is not None and stored and kernel.is_opaque and kernel.form.per_device:
        raise ValueError(
            f"{label}: its kernel was quantized on each device of a mesh, and here the devices cannot run it by "
            f"themselves: {plan.reason}. Quantize it again where it is used (is_first_microbatch=None)"
        )
    multiple = precision.alignment
    if prod(shape[:-1]) % multiple or shape[-1] % multiple or prod(kernel.shape[1:]) % multiple:
        raise _misaligned(label, precision, shape, kernel.shape)
    if options.save_original_input and precision.amax_rule is not None:
        raise ValueError(
            f"{label}: save_original_input quantizes the input again in backward, which would see another scale under "
            "DelayedScaling; use Float8CurrentScaling or a block recipe, or leave it off"
        )
    return LinearSpec(
        backend=backend,
        precision=precision,
        plan=plan,
        options=options,
        x_dtype=x_dtype,
        wgrad_dtype=kernel.dtype if sink is None else sink.dtype,
        kernel_rank=kernel.ndim,
        stored_quantized=stored,
        bias_dtype=None if bias is None else bias.dtype,
        kernel_all_gather=() if stored and not precision.kernel.one_scale else plan.kernel_all_gather,
        saves_original=(
            options.save_original_input and precision.x.quantizer is not None and not precision.overridden[2]
        ),
        grad_sink=sink is not None,
        observer=ambient_observer.value,
    )


def _shards(plans: list[Plan], weights: list[LinearWeights]) -> Shards:
    """Return where the arrays of a call lie on the mesh, around the layers with these plans."""
    first, last = plans[0], plans[-1]
    assert first.mesh is not None
    given, plain, sinks = [], [], []
    for plan, (kernel, *_) in zip(plans, weights, strict=True):
        specs: Any = LinearWeights(plan.kernel_spec, plan.bias_spec, REPLICATED)  # type: ignore[arg-type]
        plain.append(specs)
        sinks.append(plan.kernel_spec)
        given.append(
            specs._replace(kernel=_stored_specs(plan, kernel)) if isinstance(kernel, QuantizedKernel) else specs
        )
    return Shards(
        mesh=first.mesh,
        args=LinearArgs(first.x_spec, REPLICATED, tuple(given)),
        out=last.out_spec,
        cotangents=LinearArgs(first.x_spec, REPLICATED, tuple(plain)),
        sinks=tuple(sinks),
    )


def _stored_specs(plan: Plan, kernel: QuantizedKernel) -> QuantizedKernel:
    assert plan.mesh is not None
    if kernel.is_opaque:
        form: Any = jax.sharding.PartitionSpec(plan.mesh.axis_names)
    else:
        # Arrays of the kernel's shape are sharded like it; the one scale is on every device.
        form = jax.tree.map(lambda leaf: plan.kernel_spec if leaf.shape == kernel.shape else REPLICATED, kernel.form)
    return dataclasses.replace(kernel, form=form, amax=None if kernel.amax is None else REPLICATED)


def _misaligned(
    label: str, precision: Precision, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]
) -> ValueError:
    multiple, where = precision.alignment, f"{label} under recipe {precision.recipe_name!r}"
    sizes = {"token count": prod(x_shape[:-1]), "input size": kernel_shape[0], "output size": prod(kernel_shape[1:])}
    name, size = next((name, size) for name, size in sizes.items() if size % multiple)
    return ValueError(
        f"{where}: {name} {size} must be a multiple of {multiple} (the next is {size + -size % multiple}); input "
        f"{x_shape}, kernel {kernel_shape}. Change the size, or run this layer inside `with autocast(None):`"
    )
