"""Backward passes in two halves: the input's gradient first, the GEMMs of the kernels' gradients on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial

from jax_te._validation import checked, float_dtype
from jax_te.layers import quantizable_kernels, set_grad_sinks
from jax_te.ops.linear import Probe, Summands, deferred_sink, deferred_wgrad
from jax_te.quantize import as_float32, with_max_gradients
from jax_te.training.gradients import split_parameters
from jax_te.training.kernel_gradients import Path, SummandPlace
from jax_te.training.state import split_model
from jax_te.typing import DTypeLike, PyTree


class FirstHalf(NamedTuple):
    """Result of the first half of a backward pass, see `deferred_vjp`.

    Args:
        inputs: gradients of the inputs, one for each.
        params: ``nnx.State``, gradients of the parameters that do not wait: biases, norms, embeddings.
        quantizers: ``nnx.State``, next states of delayed scaling.
        backward_dw: ``backward_dw()`` returns the ``nnx.State`` of the gradients that wait. A pytree of the operands of
            their GEMMs.

    >>> FirstHalf._fields
    ('inputs', 'params', 'quantizers', 'backward_dw')
    """

    inputs: tuple[PyTree, ...]
    params: nnx.State
    quantizers: nnx.State
    backward_dw: Partial


@checked
def deferred_vjp(
    fn: Callable[..., Any],
    model: nnx.Module,
    *inputs: PyTree,
    has_aux: bool = False,
    wgrad_dtype: DTypeLike | None = None,
) -> tuple[Any, ...]:
    """Return ``fn(model, *inputs)`` and its backward pass in two halves, kernel gradients in the second.

    A pipeline stage can pass its input's gradient on before it computes those of its kernels. The kernels of `Linear`,
    `LayerNormLinear` and `LayerNormMLP`, anywhere in the model, are deferred; all other gradients are returned at once.
    The first half runs no GEMM of a kernel's gradient and keeps the two operands of each in quantized form; the second
    half runs only these GEMMs.

    ``backward`` and ``backward_dw`` are ``jax.tree_util.Partial``: pytrees of the arrays they need, which may be
    returned from one jitted function and given to another, stacked or carried by ``lax.scan``, or kept in a queue.

    Args:
        fn: ``fn(model, *inputs) -> y``, differentiable. It gets a copy of the model, whose changes are lost. It reads
            the kernels that wait by calling their layers; the gradient of any other use is left out.
        model: model whose kernel gradients are deferred. Kernels may be stored quantized.
        inputs: pytrees whose gradients are needed at once.
        has_aux: ``fn`` returns ``(y, aux)``; only ``y`` is differentiated.
        wgrad_dtype: dtype of the deferred gradients. None: each kernel's own, fp32 for one that is stored quantized.

    Returns:
        ``(y, backward)``, or ``(y, backward, aux)``. ``backward(dy)`` gives a `FirstHalf`, and its ``backward_dw()``
        the gradients of the kernels, any number of times; on a mesh it needs the same mesh in use.

    A layer that ``fn`` calls more than once is not deferred. One that a loop inside of ``fn`` repeats on the same
    kernel (not on a slice of stacked kernels) cannot: its gradient is nan.

    Source: Megatron-Core's ``delay_wgrad_compute`` and ``backward_dw``, Transformer Engine's ``WeightGradStore``; the
    split into B and W of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".

    Two stages and two microbatches. All input gradients travel first, kernel gradients are computed afterwards:

    >>> from jax_te.layers import Linear
    >>> stages = [Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
    >>> stage, queue = lambda model, x: jnp.tanh(model(x)), []
    >>> for x in jnp.ones((2, 3, 4)):
    ...     h, backward0 = deferred_vjp(stage, stages[0], x)
    ...     y, backward1 = deferred_vjp(stage, stages[1], h)
    ...     half1 = backward1(jnp.ones_like(y))  # B of stage 1: one GEMM
    ...     half0 = backward0(half1.inputs[0])  # B of stage 0
    ...     queue.append((half0.backward_dw, half1.backward_dw))
    >>> totals = [jax.tree.map(lambda *grads: sum(grads), *[later() for later in stage]) for stage in zip(*queue)]  # W
    >>> [total["kernel"].shape for total in totals]
    [(4, 4), (4, 4)]
    """
    wgrad_dtype = None if wgrad_dtype is None else float_dtype("wgrad_dtype", wgrad_dtype)
    graphdef, params, quantizers, rest = split_model(model)

    def run(sinks: PyTree, plain: PyTree, quantizers: PyTree, *inputs: PyTree) -> Any:
        merged = nnx.merge_state(plain, kept)
        # A copy: changes that fn makes to its model, which may be tracers, must not reach the caller's Variables.
        used = nnx.merge(graphdef, merged, quantizers, rest, copy=True)
        set_grad_sinks(used, sinks)
        return fn(used, *inputs)

    # First an abstract pass, in which every op reports the operands of its kernel gradient: the sinks' shapes.
    plain, kept = split_parameters(params)
    values = {path: getattr(module, name).get_value() for path, module, name in quantizable_kernels(model)}
    probes = {path: Probe() for path in values}

    def total(*args: PyTree) -> Any:
        y = run(probes, *args)
        # For all of y: a part without a cotangent would omit the backward passes that only it reaches.
        leaves = [leaf for leaf in jax.tree.leaves(y[0] if has_aux else y) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(jnp.sum(leaf).astype(jnp.float32) for leaf in leaves)

    # A state that is used several times has several next values, which merge by maximum, not by sum.
    states = with_max_gradients(quantizers)
    jax.eval_shape(lambda *args: jax.vjp(total, *args)[1](jnp.ones(())), plain, states, *inputs)
    sinks: dict[Any, Any] = {}
    gemms, stored, variables = [], dict(nnx.to_flat_state(kept)), dict(nnx.to_flat_state(params))
    # Gradients have the metadata of their parameters, which jax.tree.map and optax require to pair them.
    like = {path: jax.tree.structure(variables[path].replace(0.0)) for path in values if path in variables}
    for path, value in values.items():
        probe = probes[path]
        # After two calls JAX would add up the operands of two GEMMs; without a layer nothing differentiates the kernel.
        if probe.calls == 1 and probe.layer is not None and probe.operands is not None:
            spec = probe.layer
            lead = value.shape[: len(value.shape) - spec.kernel_rank]
            dtype = wgrad_dtype or (jnp.float32 if spec.stored_quantized else spec.wgrad_dtype)
            sinks[path] = deferred_sink(spec, probe.operands, lead)
            gemms.append((path, replace(spec, wgrad_dtype=dtype), lead))
        elif probe.calls and path in stored:
            # It has no gradient itself: without a sink none would be returned.
            sinks[path] = jnp.zeros(value.shape, wgrad_dtype or jnp.float32)

    waiting = {path for path, *_ in gemms}
    flat = nnx.to_flat_state(plain)
    plain = nnx.from_flat_state([(path, leaf) for path, leaf in flat if path not in waiting])
    # Constants of the first half, whose gradients would be arrays of zeros.
    kept = nnx.merge_state(kept, nnx.from_flat_state([(path, leaf) for path, leaf in flat if path in waiting]))
    y, vjp, *aux = jax.vjp(run, sinks, plain, states, *inputs, has_aux=has_aux)
    return (y, Partial(_First(tuple(gemms), tuple(like.items())), vjp), *aux)


def with_summands(backward: Partial, places: dict[Path, SummandPlace]) -> Partial:
    """Return ``backward`` of `deferred_vjp`, with summands for the deferred kernels in ``places``."""
    gemms = [
        (path, replace(spec, sink=Summands(places[path].over), wgrad_dtype=jnp.float32), lead)
        if path in places and spec.plan.mesh is not None
        else (path, spec, lead)
        for path, spec, lead in backward.func.gemms  # type: ignore[attr-defined]
    ]
    return Partial(replace(backward.func, gemms=tuple(gemms)), *backward.args)  # type: ignore[type-var]


# Classes that compare by value, not closures: a Partial's function is part of its tree structure, which lax.scan and
# a stack of microbatches compare.
@dataclass(frozen=True)
class _First:
    """The first half: the deferred GEMMs, and the structure of each kernel's Variable."""

    gemms: tuple[tuple[Any, ...], ...]
    like: tuple[tuple[Path, Any], ...]

    def __call__(self, vjp: Any, dy: PyTree) -> FirstHalf:
        sinks, params, quantizers, *inputs = vjp(dy)
        later = Partial(_Second(self.gemms, self.like), {path: sinks.pop(path) for path, *_ in self.gemms})
        at_once = _gradients(self.like, sinks)
        return FirstHalf(tuple(inputs), nnx.merge_state(params, at_once), as_float32(quantizers), later)


@dataclass(frozen=True)
class _Second:
    """The second half: the deferred GEMMs."""

    gemms: tuple[tuple[Any, ...], ...]
    like: tuple[tuple[Path, Any], ...]

    def __call__(self, sinks: PyTree) -> nnx.State:
        return _gradients(self.like, {path: deferred_wgrad(spec, sinks[path], lead) for path, spec, lead in self.gemms})


def _gradients(like: tuple[tuple[Path, Any], ...], arrays: dict[Path, Any]) -> nnx.State:
    """Return gradients in Variables like their parameters."""
    treedefs = dict(like)
    return nnx.from_flat_state([(path, jax.tree.unflatten(treedefs[path], [grad])) for path, grad in arrays.items()])
