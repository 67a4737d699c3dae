"""Loss and gradients: fp32 gradients of kernels, which are quantized once a step, and merged quantizer states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers.internal import drop_cached_kernels, quantizable_kernels, quantize_kernels, use_cached_kernels
from jax_te.quantize import QuantizedKernel, as_float32, merge_quantizers, with_max_gradients
from jax_te.sharding import constrain
from jax_te.sharding.internal import leaves_with_axes
from jax_te.training.masters import full_precision
from jax_te.training.state import TrainState, split_model
from jax_te.typing import Array, PyTree


class WeightedMean(NamedTuple):
    """A mean loss as two sums, which a ``loss_fn`` may return so that microbatches with more tokens count for more.

    Args:
        total: ``[]``, the sum of the weighted losses.
        weight: ``[]``, the sum of the weights, e.g. a number of tokens. It may not depend on parameters: no gradient
            passes through it.

    >>> float(WeightedMean(jnp.float32(6.0), jnp.int32(4)).mean)
    1.5
    """

    total: Array
    weight: Array

    @property
    def mean(self) -> Array:
        """The mean, fp32; the total where the weight is 0."""
        weight = jax.lax.stop_gradient(jnp.asarray(self.weight, jnp.float32))
        # The divisor is replaced before the division, not the quotient after it: 0 / 0 would make the gradient nan.
        return self.total.astype(jnp.float32) / jnp.where(weight == 0.0, 1.0, weight)


LossFn = Callable[[Any, PyTree, Array | None], Array | WeightedMean]
"""``loss_fn(model, batch, key)``: the mean loss over a batch, a scalar or a `WeightedMean`, which also says
how much the batch counts beside others. ``key`` is None in evaluation: no dropout."""

Gradients = tuple[Array, PyTree, PyTree, PyTree]
"""Loss (fp32), its scaled gradients (fp32), next quantizer states, the model's other state."""


def gradients(loss_fn: LossFn, state: TrainState, batch: PyTree, key: Array) -> Gradients:
    """Return loss and gradients of one batch."""
    return _differentiate(loss_fn, state, state.rest, batch, key, cached=None)[0]


def accumulated_gradients(
    loss_fn: LossFn, state: TrainState, batches: PyTree, key: Array, microbatches: int, keep_kernels: bool = True
) -> Gradients:
    """Return the means of `gradients` over microbatches, from one scan; ``batches`` has leaves ``[m, b / m, ...]``.

    Means are weighted if ``loss_fn`` gives weights. Kernels are quantized before the scan if ``keep_kernels``.
    """
    model = nnx.merge(state.graphdef, state.params, state.quantizers, state.rest)
    cached = quantize_kernels(model) if keep_kernels else None

    def body(carry: PyTree, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        total, sums, rest = carry
        batch, index = microbatch
        (loss, grads, quantizers, rest), weight = _differentiate(
            loss_fn, state, rest, batch, jax.random.fold_in(key, index), cached=cached
        )
        if weight is not None:
            # Not gradients of the totals: these would be so much larger that fp16 overflows sooner.
            loss, grads = jax.tree.map(lambda mean: mean * weight, (loss, grads))
        # Each gradient is added to its sum where it is computed, so that no second copy of all gradients exists.
        return (total + loss, jax.tree.map(jnp.add, sums, grads), rest), (quantizers, weight)

    # The carry keeps its sharding over the scan, so it starts in that of the parameters.
    zeros = as_created(jax.tree.map(jnp.zeros_like, _wide(full_precision(state.params, state.masters))))
    start = (jnp.zeros((), jnp.float32), zeros, as_created(state.rest))
    (total, sums, rest), (stacked, weights) = jax.lax.scan(
        body, start, (batches, jnp.arange(microbatches, dtype=jnp.int32))
    )

    def mean(total: Array) -> Array:
        return total / microbatches if weights is None else WeightedMean(total, jnp.sum(weights)).mean

    loss, grads = jax.tree.map(mean, (total, sums))
    return loss, grads, merge_quantizers(stacked), rest


def _differentiate(
    loss_fn: LossFn,
    state: TrainState,
    rest: PyTree,
    batch: PyTree,
    key: Array,
    *,
    cached: list[QuantizedKernel | None] | None,
) -> tuple[Gradients, Array | None]:
    """Return `Gradients`, and the weight of the batch if ``loss_fn`` gives one."""
    plain, quantized = split_parameters(state.params)
    model = nnx.merge(state.graphdef, state.params, state.quantizers, rest)
    kernels = [(path, getattr(module, name).get_value()) for path, module, name in quantizable_kernels(model)]
    grad_sinks = {path: _grad_sink(value) for path, value in kernels}

    def scaled_loss(plain: PyTree, grad_sinks: PyTree, quantizers: PyTree) -> tuple[Array, tuple[Array, Any, PyTree]]:
        params = nnx.merge_state(plain, quantized)
        model = nnx.merge(state.graphdef, params, quantizers, rest, copy=True)
        use_cached_kernels(model, [None] * len(kernels) if cached is None else cached, list(grad_sinks.values()))
        value = loss_fn(model, batch, key)
        loss = mean_loss(value)
        weight = jnp.asarray(value.weight, jnp.float32) if isinstance(value, WeightedMean) else None
        # The caches belong to this pass: they must not be among the model's other state that is returned.
        drop_cached_kernels(model)
        return state.scaler.scale_loss(loss), (loss, weight, split_model(model)[3])

    # allow_int: the dtype of with_max_gradients is no ordinary float.
    differentiate = jax.grad(scaled_loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    (grads, sink_grads, quantizers), (loss, weight, rest) = differentiate(
        plain, grad_sinks, with_max_gradients(state.quantizers)
    )
    total = dict(nnx.to_flat_state(_wide(grads)))
    full = dict(nnx.to_flat_state(full_precision(state.params, state.masters)))
    for path, grad in sink_grads.items():
        if grad is not None:
            # The gradient of a plain kernel itself is zero, unless the model also uses it outside of its layer.
            total[path] = total[path].replace(total[path] + grad) if path in total else full[path].replace(grad)
    grads = as_created(nnx.from_flat_state(total.items()))
    return (loss, grads, as_float32(quantizers), as_created(rest)), weight


def _grad_sink(kernel: Array | QuantizedKernel) -> Array | None:
    """An array whose values nothing reads, and whose gradient is the kernel's, in fp32. None for an fp32 kernel."""
    # JAX gives a gradient the dtype of its argument, so that of a bf16 kernel would be rounded to bf16.
    if isinstance(kernel, QuantizedKernel):
        return jnp.zeros(kernel.shape, jnp.float32)
    return None if kernel.dtype == jnp.float32 else jnp.zeros_like(kernel, jnp.float32)


def split_parameters(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Return the parameters that are plain arrays, and those that are stored quantized."""
    plain, quantized = [], []
    for path, variable in nnx.to_flat_state(params):
        (quantized if isinstance(variable.get_value(), QuantizedKernel) else plain).append((path, variable))
    return nnx.from_flat_state(plain), nnx.from_flat_state(quantized)


def as_created(tree: PyTree) -> PyTree:
    """Return ``tree`` with every leaf in the sharding that it was created with."""
    # Otherwise the compiler chooses, a step could not take over (donate) its state's buffers, and the next step, with
    # other shardings, would be compiled again.
    leaves = [constrain(leaf, axes) for _, leaf, axes in leaves_with_axes(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def mean_loss(loss: Array | WeightedMean) -> Array:
    """Return what a `LossFn` gave as fp32 ``[]``; raise ValueError if it is no scalar."""
    mean = loss.mean if isinstance(loss, WeightedMean) else loss
    if jnp.shape(mean) != ():
        raise ValueError(f"loss_fn must give a scalar, the mean loss of its batch, got shape {jnp.shape(mean)}")
    return mean.astype(jnp.float32)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
