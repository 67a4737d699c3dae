"""The model on one stage of a pipeline: the layers of its chunks, and the parts around the stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import aux_losses_scaled, quantize_kernels, use_cached_kernels
from jax_te.models import StackInput
from jax_te.quantize import QuantizerState
from jax_te.training import gradients
from jax_te.training.deferred import deferred_vjp, with_summands
from jax_te.training.gradients import Gradients, WeightedMean
from jax_te.training.kernel_gradients import KernelGradients, SummandPlace
from jax_te.training.kernel_gradients import Path as KernelPath
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.pipeline.cut import AXIS, Cut, Flat
from jax_te.training.pipeline.loss import PipelinedLoss, StackArrays, without_gradient
from jax_te.training.pipeline.schedule import Schedule
from jax_te.typing import Array, PyTree


class Look(NamedTuple):
    """Results of a first trace of the parts around the layers.

    Args:
        inputs: shapes of the layers' arguments.
        options: arguments of `run_layers` that are not arrays.
        weighted: whether the loss is a `WeightedMean`.
    """

    inputs: StackArrays
    options: Mapping[str, Any]
    weighted: bool


class Program(NamedTuple):
    """Program of all stages.

    Args:
        loss: loss of a microbatch, in its parts.
        graphdef: graph definition of the model.
        scaler: loss scaler.
        cut: points at which the model is cut.
        look: results of a first trace.
        schedule: schedule of the step.
        keep_kernels: whether to quantize each kernel once a step.
        kernels: computation of the kernels' gradients.
    """

    loss: PipelinedLoss
    graphdef: Any
    scaler: LossScale
    cut: Cut
    look: Look
    schedule: Schedule
    keep_kernels: bool
    kernels: KernelGradients


class ChunkModel(nnx.Module):
    """The layers of one chunk."""

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(list(layers))


class StageModel:
    """Layers, embedding, head and loss for one stage, inside of a ``shard_map`` over the pipeline axis.

    Args:
        program: program of all stages.
        stacked: parameters and quantizer states of the stage's layers, ``[v, ...]`` for each position of a chunk.
        outer: parameters and quantizer states around the stack.
        batches: microbatches, leaves ``[m, b / m, ...]``.
        key: random key of the step.

    Attributes:
        index: index of the stage.
        weights: weight of each microbatch, fp32 ``[m]``; None for a loss without weights.
        places: places of summands, for the kernels of a chunk whose gradients are deferred.
    """

    def __init__(self, program: Program, stacked: Any, outer: Any, batches: PyTree, key: Array):
        self.program, self.cut, self.schedule = program, program.cut, program.schedule
        self.params, self.states = stacked
        self.outer, self.outer_states = outer
        self.batches, self.key = batches, key
        self.index = jax.lax.axis_index(AXIS)
        self._counts, self._numbers = (jnp.asarray(table)[self.index] for table in (self.cut.counts, self.cut.numbers))
        self.weights = self._weights() if program.look.weighted else None
        self.places = self._places()
        self._cached = self._quantized_kernels() if program.keep_kernels else None

    # --- layers

    def chunk(self, tree: PyTree, chunk: Array | int) -> PyTree:
        """Return one chunk of leaves ``[v, ...]``."""
        if self.schedule.virtual_stages == 1:
            return jax.tree.map(lambda leaf: leaf[0], tree)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chunk, keepdims=False), tree)

    def _module(self, chunk: Array | int) -> ChunkModel:
        own = zip(self.cut.graphdefs, *self.chunk((self.params, self.states), chunk), strict=True)
        return ChunkModel([nnx.merge(graphdef, *map(as_state, parts)) for graphdef, *parts in own])

    def _places(self) -> dict[KernelPath, SummandPlace]:
        model = self._module(0)
        return self.program.kernels.waiting(model, nnx.state(model, nnx.Param))

    def _quantized_kernels(self) -> Any:
        """Return the stage's `KernelCache`, ``[v, ...]``."""
        found = [quantize_kernels(self._module(chunk)) for chunk in range(self.schedule.virtual_stages)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def forward(self, chunk: Array | int, given: StackArrays) -> tuple[Array, PyTree]:
        """Return the output ``[b, s, h]`` of a chunk of layers, and its backward pass by ``(x, learned)``.

        The backward pass is `deferred_vjp`'s if kernel gradients are deferred, else `vjp_of_model`'s.
        """
        model, options = self._module(chunk), self.program.look.options
        if self._cached is not None:
            use_cached_kernels(model, self.chunk(self._cached, chunk))
        common, count = int(self.cut.counts.min()), self._counts[chunk]

        def run(model: ChunkModel, inputs: tuple[Array, dict[str, Any]]) -> Array:
            layers, (x, learned) = list(model.layers), inputs
            keys: Any = [None] * len(layers)
            if given.keys is not None:
                keys = [given.keys[number] for number in self._numbers[chunk]]

            def output(part: slice, x: Array) -> Array:
                return StackInput(x, keys[part], given.arrays, learned, options).output(layers[part])

            with aux_losses_scaled(model, self.program.scaler.scale):
                x = output(slice(common), x)
                for j in range(common, len(layers)):
                    # A chunk with fewer layers than others runs an idle one, in the time that the others need.
                    x = jnp.where(j < count, output(slice(j, j + 1), x), x)
            return x

        # Kernel gradients that need not be deferred are computed in the ordinary way, which has no restrictions.
        x, inputs, kernels = given.x, (given.x, given.learned), self.program.kernels
        if self.schedule.waits:
            y, backward = deferred_vjp(run, model, inputs, wgrad_dtype=kernels.dtype)
            backward = with_summands(backward, self.places)
        else:
            y, backward = gradients.vjp_of_model(run, model, inputs, kernels)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"stages of a pipeline pass on activations of one kind, and the layers get {x.dtype}{list(x.shape)} "
                f"and give {y.dtype}{list(y.shape)}; cast the stack's input, or take a mesh without a pipeline axis"
            )
        return y, backward

    # --- around the layers

    def microbatch(self, number: Array) -> tuple[PyTree, Array]:
        """Return a microbatch and its key."""
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), self.batches)
        return batch, jax.random.fold_in(self.key, number)

    def outer_model(self) -> Any:
        """Return the model with the Variables around the stack; Variables of its layers hold no arrays."""
        outer = as_state(self.outer), as_state(self.outer_states)
        layers = self.cut.without_arrays(self.params) | self.cut.without_arrays(self.states)
        return nnx.merge(self.program.graphdef, *outer, as_state(layers))

    def before(self, model: Any, number: Array) -> StackInput:
        """Return the layers' input for a microbatch."""
        return self.program.loss.before(model, *self.microbatch(number))

    def loss_gradients(self, y: Array, number: Array) -> Gradients:
        """Return loss and gradients of the part after the layers, by the Variables there and by ``y``."""

        def after(model: Any, y: Array) -> Array | WeightedMean:
            value = self.program.loss.after(model, y, *self.microbatch(number))
            if not isinstance(value, WeightedMean):
                return value
            return value._replace(weight=without_gradient(jnp.asarray(value.weight), _WEIGHT))

        return self._differentiate(after, self.program.scaler, y)

    def input_gradients(self, number: Array, given: tuple[Array, dict[str, Any]]) -> Gradients:
        """Return gradients of the part before the layers, whose results' gradients are ``given``: ``(x, learned)``."""

        def before(model: Any) -> Array:
            # The gradients are those of a loss that is scaled already.
            with aux_losses_scaled(model, self.program.scaler.scale):
                stack = self.before(model, number)
            without_gradient(dict(stack.arrays), _ARRAYS)  # for its error
            products = jax.tree.map(
                lambda value, gradient: jnp.sum(value.astype(jnp.float32) * gradient.astype(jnp.float32)),
                (stack.x, dict(stack.learned)),
                given,
            )
            return sum(jax.tree.leaves(products), jnp.float32(0.0))

        return self._differentiate(before, ConstantLossScale())

    def _differentiate(self, fn: Callable[..., Any], scaler: LossScale, *inputs: Array) -> Gradients:
        """Return gradients of ``fn(model, *inputs) -> [ ]`` by the Variables around the stack, and by ``inputs``."""
        own = {path for places in self.cut.places for path in places.values()}
        nothing = nnx.State({})
        graphdef, layers, params, states = nnx.split(
            self.outer_model(), lambda path, value: path in own, nnx.Param, QuantizerState
        )
        how = gradients.Differentiation(
            split=lambda model: (None, nothing, nothing, nothing),
            scaler=scaler,
            # Outside of the stack devices sum at once: few parameters there belong to layers.
            kernels=self.program.kernels._replace(once=False),
        )
        parts = graphdef, params, states, layers
        return gradients.differentiate(lambda *args: (fn(*args), None), parts, how, inputs)

    def _weights(self) -> Array:
        """Return the weight of each microbatch, fp32 ``[m]``."""
        y = jnp.zeros(self.program.look.inputs.x.shape, self.program.look.inputs.x.dtype)

        def weight(number: Array) -> Array:
            # It depends only on the batch, so the compiler drops everything else.
            value: Any = self.program.loss.after(self.outer_model(), y, *self.microbatch(number))
            return jnp.asarray(value.weight, jnp.float32)

        return jax.lax.map(weight, jnp.arange(self.schedule.microbatches))

    def weighted(self, tree: PyTree, number: Array) -> PyTree:
        """Return arrays times the weight of a microbatch."""
        weights = self.weights
        return tree if weights is None else jax.tree.map(lambda leaf: leaf * weights[number], tree)


_WEIGHT = (
    "the weight of the WeightedMean that after gives depends on the layers' output or on parameters, and a pipeline's "
    "stages need it before they have these; compute it from the batch, or take a mesh without a pipeline axis"
)
_ARRAYS = (
    "arrays of the StackInput that before gives depend on parameters, and no gradient would reach these; give them as "
    "learned, StackInput(x, learned={...})"
)


def as_state(flat: Flat) -> nnx.State:
    """Return Variables by path as an ``nnx.State``."""
    return nnx.from_flat_state(flat.items())
