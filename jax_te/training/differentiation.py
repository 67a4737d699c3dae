"""Loss, fp32 gradients and next quantizer states of a model: in one pass, or as a backward pass to call later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial

from jax_te.layers import (
    KernelCache,
    aux_losses_scaled,
    cached_kernels,
    set_grad_sinks,
    states_advance,
    with_grad_sinks,
)
from jax_te.models import layers_traced_once
from jax_te.quantize import QuantizedKernel, as_float32, with_max_gradients
from jax_te.training.kernel_gradients import KernelGradients, Path, SummandPlace
from jax_te.training.loss import WeightedMean, check_differentiable, mean_loss
from jax_te.training.loss_scale import LossScale
from jax_te.training.state import SplitModel, constrain_as_created, split_model
from jax_te.typing import Array, PyTree


class Gradients(NamedTuple):
    """Loss and gradients of a batch.

    Args:
        loss: fp32 ``[]``.
        grads: ``nnx.State``, gradients of the scaled loss, fp32; of a microbatch's, times its share.
        quantizers: next quantizer states.
        rest: the model's other state.
        counts: counts with which each of several microbatches in a loop began, stacked, see `MicrobatchStart`.
    """

    loss: Array
    grads: nnx.State
    quantizers: nnx.State
    rest: nnx.State
    counts: PyTree = None


class Differentiated(NamedTuple):
    """Result of `differentiate`.

    Args:
        gradients: loss, gradients by the model, and its next state.
        summands: summands of the kernels' gradients that ``gradients`` lack, see `KernelGradients`.
        inputs: gradients by the function's other inputs, in their dtypes.
        aux: auxiliary output of the function.
    """

    gradients: Gradients
    summands: dict[Path, Array]
    inputs: tuple[Array, ...]
    aux: Any


@dataclass(frozen=True, kw_only=True)
class Differentiation:
    """Computation of gradients by `differentiate`.

    Args:
        rest_of: function that returns the other state of the model after the call.
        scaler: multiplier of the loss.
        share: factor of the loss in the batch's, 1 / m of one of m microbatches. With it the layers' gradients, and so
            the scales of delayed scaling, do not depend on the number of microbatches.
        kernels: computation of the kernels' gradients; those of some are given as ``summands``, see `Differentiated`.
        cached: kernels that the caller has quantized already, and which layers go without after the call. None: layers
            keep what they cache themselves, as other state.
        like: Variables whose axes the gradients have. None: the parameters.
    """

    rest_of: Callable[[Any], nnx.State]
    scaler: LossScale
    kernels: KernelGradients
    share: float = 1.0
    cached: KernelCache | None = None
    like: nnx.State | None = None


def differentiate(
    fn: Callable[..., tuple[Array | WeightedMean, Any]],
    parts: SplitModel,
    differentiation: Differentiation,
    inputs: tuple[Array, ...] = (),
) -> Differentiated:
    """Return loss and gradients of ``fn(model, *inputs) -> loss, aux``.

    Args:
        fn: function, which may change the model's other state.
        parts: parts of the model.
        differentiation: loss scale, and treatment of kernels.
        inputs: other arrays to differentiate by.
    """
    graphdef, params, quantizers, rest = parts
    plain, quantized = split_parameters(params)
    names = dict(nnx.to_flat_state(params if differentiation.like is None else differentiation.like))
    model = nnx.merge(graphdef, params, quantizers, rest)
    kernels = differentiation.kernels
    grad_sinks, places = kernels.sinks(model, params), kernels.summand_places(model, params)

    def scaled_loss(plain: PyTree, grad_sinks: PyTree, quantizers: PyTree, inputs: PyTree) -> tuple[Array, Any]:
        model = nnx.merge(graphdef, nnx.merge_state(plain, quantized), quantizers, rest, copy=True)
        # These belong to this pass: they must not be part of the returned model's other state.
        cached = differentiation.cached
        kept = contextlib.nullcontext() if cached is None else cached_kernels(model, cached)
        losses = aux_losses_scaled(model, differentiation.scaler.scale * differentiation.share)
        with kept, with_grad_sinks(model, grad_sinks), losses, layers_traced_once(), states_advance():
            value, aux = fn(model, *inputs)
        check_differentiable(value)
        loss = mean_loss(value)
        scaled = differentiation.scaler.scale_loss(loss * differentiation.share)
        return scaled, (loss, differentiation.rest_of(model), aux)

    # allow_int: the dtype of with_max_gradients is not an ordinary float.
    differentiated = jax.grad(scaled_loss, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)
    (grads, sink_grads, quantizers, input_grads), (loss, rest, aux) = differentiated(
        plain, grad_sinks, with_max_gradients(quantizers), inputs
    )

    def as_created(grads: dict[Path, Array]) -> dict[Path, Array]:
        # Before the cast: between an all-reduce and a slice of it a cast would keep XLA from a reduce-scatter.
        variables = constrain_as_created(
            nnx.from_flat_state([(path, names[path].replace(grads[path])) for path in grads])
        )
        return _arrays(wide(variables))

    total, summands = _with_sinks(_arrays(grads), sink_grads, places, as_created)
    grads = nnx.from_flat_state([(path, names[path].replace(grad)) for path, grad in total.items()])
    gradients = Gradients(loss, grads, as_float32(quantizers), constrain_as_created(rest))
    return Differentiated(gradients, summands, input_grads, aux)


def vjp_of_model(
    fn: Callable[..., Array], model: nnx.Module, x: PyTree, kernels: KernelGradients
) -> tuple[Array, Partial]:
    """Return ``fn(model, x)`` and its backward pass.

    Args:
        fn: differentiable function. It gets a copy of the model.
        model: model, which may have cached kernels, and kernels that are stored quantized.
        x: pytree of arrays.
        kernels: see `Differentiation`.

    Returns:
        ``(y, backward)``. ``backward(dy)`` gives an ``nnx.State`` of the parameters' gradients, in fp32 (of those
        kernels that ``kernels.summand_places`` gives, their summands), the next quantizer states and the gradient of
        ``x``. It is a pytree of its residuals, like `deferred_vjp`'s.
    """
    graphdef, params, quantizers, rest = split_model(model)
    plain, quantized = split_parameters(params)
    grad_sinks = kernels.sinks(model, params)

    def run(plain: PyTree, grad_sinks: PyTree, quantizers: PyTree, x: PyTree) -> Array:
        used = nnx.merge(graphdef, nnx.merge_state(plain, quantized), quantizers, rest, copy=True)
        set_grad_sinks(used, grad_sinks)
        with states_advance():
            return fn(used, x)

    y, vjp = jax.vjp(run, plain, grad_sinks, with_max_gradients(quantizers), x)
    return y, Partial(_Backward(tuple(kernels.summand_places(model, params).items())), vjp)


# No closure: the function of a Partial is part of its tree structure.
@dataclass(frozen=True)
class _Backward:
    places: tuple[tuple[Path, SummandPlace], ...]

    def __call__(self, vjp: Any, dy: Array) -> tuple[nnx.State, nnx.State, PyTree]:
        grads, sink_grads, quantizers, dx = vjp(dy)
        total, summands = _with_sinks(_arrays(grads), sink_grads, dict(self.places), wide)
        state = nnx.from_flat_state([(path, nnx.Param(grad)) for path, grad in (total | summands).items()])
        return state, as_float32(quantizers), dx


def _with_sinks(
    own: dict[Path, Array],
    sinks: dict[Path, Array | None],
    places: Mapping[Path, SummandPlace],
    prepare: Callable[[dict[Path, Array]], dict[Path, Array]],
) -> tuple[dict[Path, Array], dict[Path, Array]]:
    """Return fp32 gradients, and summands of the kernels in ``places``: of each kernel its sink's and its own, added.

    The own gradient of a kernel is zero, unless the model also uses the kernel outside of its layer.

    Args:
        own: gradients of the parameters.
        sinks: gradients of the sinks; None where a kernel has no sink.
        places: places of summands.
        prepare: function that returns gradients in fp32, in their sharding.
    """
    of_sinks = {path: grad for path, grad in sinks.items() if grad is not None}
    summands = {path: place.with_sum(of_sinks.pop(path), own.get(path)) for path, place in places.items()}
    total = prepare({path: grad for path, grad in own.items() if path not in places})
    for path, grad in prepare(of_sinks).items():
        total[path] = total[path] + grad if path in total else grad
    return total, summands


def _arrays(grads: nnx.State) -> dict[Path, Array]:
    return {path: grad.get_value() for path, grad in nnx.to_flat_state(grads)}


def split_parameters(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Return the parameters that are plain arrays, and those that are stored quantized.

    Raises:
        TypeError: for complex parameters: gradients and masters are fp32.
    """
    plain, quantized = [], []
    for path, variable in nnx.to_flat_state(params):
        if jnp.issubdtype(variable.dtype, jnp.complexfloating):
            name = "/".join(map(str, path))
            raise TypeError(
                f"parameter {name} is {variable.dtype}, and gradients are fp32, without an imaginary part; keep its "
                "real and its imaginary part as two parameters, or differentiate by flax.nnx.value_and_grad"
            )
        (quantized if isinstance(variable.get_value(), QuantizedKernel) else plain).append((path, variable))
    return nnx.from_flat_state(plain), nnx.from_flat_state(quantized)


def wide(tree: PyTree) -> PyTree:
    """Return arrays in fp32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
