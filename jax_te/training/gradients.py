"""Loss and gradients: in fp32 for kernels, which are quantized once a step, and with quantizer states merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

LossFn = Callable[[Any, PyTree, Array | None], Array]
"""``loss_fn(model, batch, key) -> scalar``: the mean loss over a batch. ``key`` is None in evaluation: no dropout."""

Gradients = tuple[Array, PyTree, PyTree, PyTree]
"""Loss (fp32), its scaled gradients (fp32), next quantizer states, the model's other state."""


def gradients(loss_fn: LossFn, state: TrainState, batch: PyTree, key: Array) -> Gradients:
    """Loss and gradients over one batch."""
    return _differentiate(loss_fn, state, state.rest, batch, key, kept=None)


def accumulated_gradients(
    loss_fn: LossFn, state: TrainState, parts: PyTree, key: Array, microbatches: int, keep_kernels: bool = True
) -> Gradients:
    """As `gradients`, the mean over microbatches, in one scan; ``parts`` has leaves ``[m, b / m, ...]``.

    Kernels are quantized before the scan, with ``keep_kernels``. Each gradient is added to its fp32 sum where it is
    made, so that no second copy of all gradients exists.
    """
    model = nnx.merge(state.graphdef, state.params, state.quantizers, state.rest)
    kept = quantize_kernels(model) if keep_kernels else None

    def body(carry: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
        total, sums, rest = carry
        batch, index = part
        loss, grads, quantizers, rest = _differentiate(
            loss_fn, state, rest, batch, jax.random.fold_in(key, index), kept=kept
        )
        return (total + loss, jax.tree.map(jnp.add, sums, grads), rest), quantizers

    zeros = as_created(jax.tree.map(jnp.zeros_like, _wide(full_precision(state.params, state.masters))))
    start = (jnp.zeros((), jnp.float32), zeros, as_created(state.rest))
    (total, sums, rest), stacked = jax.lax.scan(body, start, (parts, jnp.arange(microbatches, dtype=jnp.int32)))
    loss, grads = jax.tree.map(lambda leaf: leaf / microbatches, (total, sums))
    return loss, grads, merge_quantizers(stacked), rest


def _differentiate(
    loss_fn: LossFn,
    state: TrainState,
    rest: PyTree,
    batch: PyTree,
    key: Array,
    *,
    kept: list[QuantizedKernel | None] | None,
) -> Gradients:
    plain, quantized = split_parameters(state.params)
    model = nnx.merge(state.graphdef, state.params, state.quantizers, rest)
    kernels = [(path, getattr(module, name).get_value()) for path, module, name in quantizable_kernels(model)]
    places = {path: _gradient_place(value) for path, value in kernels}

    def scaled_loss(plain: PyTree, places: PyTree, quantizers: PyTree) -> tuple[Array, tuple[Array, PyTree]]:
        params = nnx.merge_state(plain, quantized)
        model = nnx.merge(state.graphdef, params, quantizers, rest, copy=True)
        use_cached_kernels(model, [None] * len(kernels) if kept is None else kept, list(places.values()))
        loss = check_loss(loss_fn(model, batch, key)).astype(jnp.float32)
        drop_cached_kernels(model)
        return state.scaler.scale_loss(loss), (loss, split_model(model)[3])

    # allow_int: the dtype of with_max_gradients is no ordinary float.
    differentiate = jax.grad(scaled_loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    (grads, kernel_grads, quantizers), (loss, rest) = differentiate(plain, places, with_max_gradients(state.quantizers))
    total = dict(nnx.to_flat_state(_wide(grads)))
    full = dict(nnx.to_flat_state(full_precision(state.params, state.masters)))
    for path, grad in kernel_grads.items():
        if grad is not None:
            total[path] = total[path].replace(total[path] + grad) if path in total else full[path].replace(grad)
    return loss, as_created(nnx.from_flat_state(total.items())), as_float32(quantizers), as_created(rest)


def _gradient_place(kernel: Array | QuantizedKernel) -> Array | None:
    """What a kernel's fp32 gradient is taken of, if not of the kernel: an array that nothing reads."""
    if isinstance(kernel, QuantizedKernel):
        return jnp.zeros(kernel.shape, jnp.float32)
    return None if kernel.dtype == jnp.float32 else jnp.zeros_like(kernel, jnp.float32)


def split_parameters(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The parameters that are plain arrays, and those that are held quantized."""
    plain, quantized = [], []
    for path, variable in nnx.to_flat_state(params):
        (quantized if isinstance(variable.get_value(), QuantizedKernel) else plain).append((path, variable))
    return nnx.from_flat_state(plain), nnx.from_flat_state(quantized)


def as_created(tree: PyTree) -> PyTree:
    """Every leaf in the sharding it was created with, so that a state can be donated and a step is compiled once."""
    leaves = [constrain(leaf, axes) for _, leaf, axes in leaves_with_axes(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def check_loss(loss: Array) -> Array:
    """``loss`` if it is a scalar; ValueError otherwise."""
    if jnp.shape(loss) != ():
        raise ValueError(f"loss_fn must give a scalar, the mean loss of its batch, got shape {jnp.shape(loss)}")
    return loss


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
