"""Backward passes in two halves: the input's gradient first, the GEMMs of the kernels' gradients on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial

from jax_te._validation import checked, float_dtype
from jax_te.layers import quantizable_kernels, set_grad_sinks, states_advance
from jax_te.ops.linear import LinearSpec, Probe, Summands, deferred_sink, deferred_wgrad
from jax_te.quantize import OpaqueTree, as_float32, with_max_gradients
from jax_te.training.differentiation import split_parameters
from jax_te.training.kernel_gradients import Path, SummandPlace
from jax_te.training.kernel_uses import InputUses, uses_of_inputs
from jax_te.training.state import split_model
from jax_te.typing import Array, DTypeLike, PyTree


class FirstHalf(NamedTuple):
    """Result of the first half of a backward pass, see `deferred_vjp`.

    Args:
        inputs: gradients of the inputs, one for each.
        params: ``nnx.State``, gradients of the parameters that are not deferred: biases, norms, embeddings.
        quantizers: ``nnx.State``, next states of delayed scaling.
        backward_dw: function without arguments that returns the ``nnx.State`` of the deferred gradients; a pytree of
            the operands of their GEMMs.

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
        fn: ``fn(model, *inputs) -> y``, differentiable. It gets a copy of the model, whose changes are lost.
        model: model whose kernel gradients are deferred. Kernels may be stored quantized.
        inputs: pytrees whose gradients are needed at once.
        has_aux: whether ``fn`` returns ``(y, aux)``, of which only ``y`` is differentiated.
        wgrad_dtype: dtype of the deferred gradients. None: each kernel's own, fp32 for one that is stored quantized.

    Returns:
        ``(y, backward)``, or ``(y, backward, aux)``. ``backward(dy)`` gives a `FirstHalf`, and its ``backward_dw()``
        the gradients of the kernels, any number of times; on a mesh it needs the same mesh in use.

    Not deferred, so that their gradients are among those at once, are kernels of layers that ``fn`` calls more than
    once, or that a loop or ``jax.vmap`` inside of ``fn`` repeats on the same kernel, not on a slice of stacked kernels;
    and kernels that ``fn`` also reads by itself, as for a penalty or a tied product, ``x @ layer.kernel[...].T``.

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
    dtype = None if wgrad_dtype is None else float_dtype("wgrad_dtype", wgrad_dtype)
    graphdef, params, quantizers, rest = split_model(model)
    plain, kept = split_parameters(params)
    # A state that is used several times has several next values, which merge by maximum, not by sum.
    states = with_max_gradients(quantizers)

    def run(kept: PyTree, sinks: PyTree, plain: PyTree, quantizers: PyTree, *inputs: PyTree) -> Any:
        merged = nnx.merge_state(plain, kept)
        # A copy: changes that fn makes to its model, which may be tracers, must not reach the caller's Variables.
        used = nnx.merge(graphdef, merged, quantizers, rest, copy=True)
        set_grad_sinks(used, sinks)
        with states_advance():
            return fn(used, *inputs)

    kernels = {path: getattr(module, name).get_value() for path, module, name in quantizable_kernels(model)}
    program = _Program(partial(run, kept), (plain, states, *inputs), has_aux)
    probes = _probe_kernels(program, kernels)
    deferred = _choose_deferred(program, probes, kernels, dtype)
    sinks: dict[Path, Any] = {path: _operand_sink(gemm, probes) for path, gemm in deferred.items()}
    # A kernel that is stored quantized has no gradient itself: without a sink none would be returned.
    for path, _ in nnx.to_flat_state(kept):
        if path in kernels and probes[path].calls and path not in deferred:
            sinks[path] = jnp.zeros(kernels[path].shape, dtype or jnp.float32)
    # Constants of the first half, whose gradients would be arrays of zeros.
    flat = nnx.to_flat_state(plain)
    constants = nnx.from_flat_state([(path, leaf) for path, leaf in flat if path in deferred])
    plain = nnx.from_flat_state([(path, leaf) for path, leaf in flat if path not in deferred])
    run_first = partial(run, nnx.merge_state(kept, constants))
    y, vjp, *aux = jax.vjp(run_first, sinks, plain, states, *inputs, has_aux=has_aux)
    # Gradients have the metadata of their parameters, which jax.tree.map and optax require to pair them.
    variables = dict(nnx.to_flat_state(params))
    like = {path: jax.tree.structure(variables[path].replace(0.0)) for path in kernels if path in variables}
    return (y, Partial(_First(tuple(deferred.values()), tuple(like.items())), vjp), *aux)


class _DeferredGemm(NamedTuple):
    """The deferred GEMM of a kernel's gradient.

    Args:
        path: path of the kernel.
        layer: the layer as its backward pass saw it, with the dtype of the gradient.
        lead: axes in front, of a kernel that is stacked.
    """

    path: Path
    layer: LinearSpec
    lead: tuple[int, ...]


class _Program(NamedTuple):
    """A function of sinks and its other arguments, for abstract passes.

    Args:
        run: ``run(sinks, *args)``.
        args: the arguments behind the sinks; the first are the parameters that are plain arrays.
        has_aux: whether ``run`` returns ``(y, aux)``.
    """

    run: Callable[..., Any]
    args: tuple[PyTree, ...]
    has_aux: bool

    def differentiated(self, sinks: PyTree, *args: PyTree) -> Any:
        """Return ``y``."""
        y = self.run(sinks, *args)
        return y[0] if self.has_aux else y


def _probe_kernels(program: _Program, kernels: Mapping[Path, Any]) -> dict[Path, Probe]:
    """Return a probe of each kernel, which has seen an abstract forward and backward pass.

    Each op reports the operands of its kernel gradient there: the shapes of the sinks.
    """
    probes = {path: Probe() for path in kernels}

    def total(*args: PyTree) -> Any:
        # For all of y: a part without a cotangent would omit the backward passes that only it reaches.
        leaves = jax.tree.leaves(program.differentiated(probes, *args))
        return sum(jnp.sum(leaf).astype(jnp.float32) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))

    jax.make_jaxpr(lambda *args: jax.vjp(total, *args)[1](jnp.ones(())))(*program.args)
    return probes


def _choose_deferred(
    program: _Program, probes: Mapping[Path, Probe], kernels: Mapping[Path, Any], dtype: Any
) -> dict[Path, _DeferredGemm]:
    """Return the GEMMs of kernels that the program reads once: JAX would add up the operands of several.

    Args:
        program: the program.
        probes: probes of the kernels, which have seen it.
        kernels: the kernels.
        dtype: dtype of the gradients. None: each kernel's own.
    """
    gemms = {}
    for path, probe in probes.items():
        # Without a layer nothing differentiates the kernel.
        if probe.calls == 1 and probe.layer is not None:
            layer, shape = probe.layer, kernels[path].shape
            own = jnp.float32 if layer.stored_quantized else layer.wgrad_dtype
            lead = shape[: len(shape) - layer.kernel_rank]
            gemms[path] = _DeferredGemm(path, replace(layer, wgrad_dtype=dtype or own), lead)
    for path in _kernels_read_again(program, gemms, probes):
        del gemms[path]
    return gemms


def _operand_sink(gemm: _DeferredGemm, probes: Mapping[Path, Probe]) -> OpaqueTree:
    operands = probes[gemm.path].operands
    assert operands is not None  # recorded together with the layer
    return deferred_sink(gemm.layer, operands, gemm.lead)


def _kernels_read_again(
    program: _Program, gemms: Mapping[Path, _DeferredGemm], probes: Mapping[Path, Probe]
) -> set[Path]:
    """Return the kernels that the program reads otherwise than once in the one call of their layer.

    Args:
        program: the program.
        gemms: GEMMs of the kernels whose layers it calls once.
        probes: their probes.
    """
    if not gemms:
        return set()
    sinks = {path: _operand_sink(gemm, probes) for path, gemm in gemms.items()}
    uses = uses_of_inputs(jax.make_jaxpr(program.differentiated)(sinks, *program.args).jaxpr)
    leaves, structure = jax.tree.flatten((sinks, *program.args))
    sinks_numbers, plain_numbers, *_ = jax.tree.unflatten(structure, range(len(leaves)))
    of_parameters = dict(nnx.to_flat_state(plain_numbers))
    again: set[Path] = set()
    for path, gemm in gemms.items():
        of_sink = jax.tree.leaves(sinks_numbers[path])
        # A kernel that is stored quantized is no plain array, and has no gradient itself.
        of_kernel = jax.tree.leaves(of_parameters.get(path))
        mapped = probes[path].mapped
        repeated = any(_is_repeated(uses, number, leaves[number], gemm, mapped) for number in of_sink)
        if repeated or any(_is_read_otherwise(uses, number, of_sink) for number in of_kernel):
            again.add(path)
    return again


def _is_repeated(uses: InputUses, sink: int, array: Array, gemm: _DeferredGemm, mapped: int) -> bool:
    """Return whether a loop or ``jax.vmap`` reads a kernel several times in one call.

    A slice of a stacked kernel in each iteration, or one for each that is mapped, is read once.

    Args:
        uses: uses of the program's inputs.
        sink: number of an array of the kernel's sink.
        array: the array.
        gemm: GEMM of the kernel's gradient.
        mapped: number of maps around the layer's call, as its probe counted them.
    """
    # Axes in front that are neither sliced away nor indexed: vmap must map them, and no others.
    return any(use.repeated or len(gemm.lead) + use.ndim - array.ndim != mapped for use in uses.calls[sink])


def _is_read_otherwise(uses: InputUses, kernel: int, sink: Sequence[int]) -> bool:
    """Return whether a kernel has a gradient of another use than by its layer, whose call reads the sink beside it."""
    if kernel in uses.results:
        return True
    return any(use.operands > 1 or use.beside.isdisjoint(sink) for use in uses.calls[kernel])


def with_summands(backward: Partial, places: dict[Path, SummandPlace]) -> Partial:
    """Return ``backward`` of `deferred_vjp`, with summands for the deferred kernels in ``places``."""
    first: _First = backward.func  # type: ignore[assignment]  # of a Partial of deferred_vjp
    gemms = [
        gemm._replace(layer=replace(gemm.layer, sink=Summands(places[gemm.path].over), wgrad_dtype=jnp.float32))
        if gemm.path in places and gemm.layer.plan.mesh is not None
        else gemm
        for gemm in first.gemms
    ]
    return Partial(replace(first, gemms=tuple(gemms)), *backward.args)


# Classes that compare by value, not closures: a Partial's function is part of its tree structure, which lax.scan and
# a stack of microbatches compare.
@dataclass(frozen=True)
class _First:
    """The first half: the deferred GEMMs, and the structure of each kernel's Variable."""

    gemms: tuple[_DeferredGemm, ...]
    like: tuple[tuple[Path, Any], ...]

    def __call__(self, vjp: Any, dy: PyTree) -> FirstHalf:
        sinks, params, quantizers, *inputs = vjp(dy)
        later = Partial(_Second(self.gemms, self.like), {gemm.path: sinks.pop(gemm.path) for gemm in self.gemms})
        at_once = _gradients(self.like, sinks)
        return FirstHalf(tuple(inputs), nnx.merge_state(params, at_once), as_float32(quantizers), later)


@dataclass(frozen=True)
class _Second:
    """The second half: the deferred GEMMs."""

    gemms: tuple[_DeferredGemm, ...]
    like: tuple[tuple[Path, Any], ...]

    def __call__(self, sinks: PyTree) -> nnx.State:
        grads = {gemm.path: deferred_wgrad(gemm.layer, sinks[gemm.path], gemm.lead) for gemm in self.gemms}
        return _gradients(self.like, grads)


def _gradients(like: tuple[tuple[Path, Any], ...], arrays: dict[Path, Any]) -> nnx.State:
    """Return gradients in Variables like their parameters."""
    treedefs = dict(like)
    return nnx.from_flat_state([(path, jax.tree.unflatten(treedefs[path], [grad])) for path, grad in arrays.items()])
