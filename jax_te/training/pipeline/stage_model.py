"""The model on one stage of a pipeline: its own layers, and the parts around the stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from jax_te.layers import quantize_kernels, use_cached_kernels
from jax_te.models import StackCall, call_of_stack, replace_stack
from jax_te.quantize import QuantizerState
from jax_te.training import gradients
from jax_te.training.deferred import deferred_vjp, with_summands
from jax_te.training.gradients import Gradients, LossFn, WeightedMean
from jax_te.training.kernel_gradients import KernelGradients, Path, SummandPlace
from jax_te.training.loss_scale import LossScale
from jax_te.training.pipeline.cut import AXIS, Cut, Flat, is_array_tree
from jax_te.training.pipeline.schedule import Schedule
from jax_te.typing import Array, PyTree


class Program(NamedTuple):
    """Program of all stages.

    Args:
        loss_fn: loss function of a microbatch.
        graphdef: graph definition of the model.
        scaler: loss scaler.
        cut: points at which the model is cut.
        schedule: schedule of the step.
        keep_kernels: whether to quantize each kernel once a step.
        kernels: computation of the kernels' gradients.
    """

    loss_fn: LossFn
    graphdef: Any
    scaler: LossScale
    cut: Cut
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
        self._check_arrays()
        self.weights = self._weights()
        self.places = self._places()
        self._cached = self._quantized_kernels() if program.keep_kernels else None

    def chunk(self, tree: PyTree, chunk: Array | int) -> PyTree:
        """Return one chunk of leaves ``[v, ...]``."""
        if self.schedule.virtual_stages == 1:
            return jax.tree.map(lambda leaf: leaf[0], tree)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chunk, keepdims=False), tree)

    def _module(self, chunk: Array | int) -> ChunkModel:
        own = zip(self.cut.graphdefs, *self.chunk((self.params, self.states), chunk), strict=True)
        return ChunkModel([nnx.merge(graphdef, *map(as_state, parts)) for graphdef, *parts in own])

    def _places(self) -> dict[Path, SummandPlace]:
        model = self._module(0)
        return self.program.kernels.waiting(model, nnx.state(model, nnx.Param))

    def _quantized_kernels(self) -> Any:
        """Return every kernel of the stage quantized, ``[v, ...]``; None where its recipe does not."""
        found = [quantize_kernels(self._module(chunk)) for chunk in range(self.schedule.virtual_stages)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def forward(self, chunk: Array | int, x: Array, arrays: dict[str, Any], keys: Array | None) -> tuple[Array, PyTree]:
        """Return the output ``[b, s, h]`` of a chunk of layers, and its backward pass.

        The backward pass is `deferred_vjp`'s if kernel gradients are deferred, else `vjp_of_model`'s.
        """
        model = self._module(chunk)
        if self._cached is not None:
            cached = self.chunk(self._cached, chunk)
            use_cached_kernels(model, cached, [None] * len(cached))
        common, count = int(self.cut.counts.min()), self._counts[chunk]
        options = self.cut.static | arrays

        def run(model: ChunkModel, x: Array) -> Array:
            layers = list(model.layers)
            own = [None] * len(layers) if keys is None else [keys[number] for number in self._numbers[chunk]]
            x = self.cut.run(layers[:common], x, own[:common], **options)
            for j in range(common, len(layers)):
                # A chunk with fewer layers than others runs an idle one, in the time that the others need.
                y = self.cut.run([layers[j]], x, [own[j]], **options)
                x = jnp.where(j < count, y, x)
            return x

        # Kernel gradients that need not be deferred are computed in the ordinary way, which has no restrictions.
        y, backward = (
            self._deferred(run, model, x)
            if self.schedule.waits
            else gradients.vjp_of_model(run, model, x, self.program.kernels)
        )
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"stages of a pipeline pass on activations of one kind, and the layers get {x.dtype}{list(x.shape)} "
                f"and give {y.dtype}{list(y.shape)}; cast the stack's input, or take a mesh without a pipeline axis"
            )
        return y, backward

    def _deferred(self, run: Callable[..., Array], model: ChunkModel, x: Array) -> tuple[Array, PyTree]:
        y, backward = deferred_vjp(run, model, x, wgrad_dtype=self.program.kernels.dtype)
        return y, with_summands(backward, self.places)

    def outer_model(self) -> Any:
        """Return the model with the Variables around the stack; those of its layers hold no arrays."""
        return nnx.merge(self.program.graphdef, as_state(self.outer), as_state(self.outer_states), self._placeholders())

    def _placeholders(self) -> nnx.State:
        found: Flat = {}
        for path, j in zip(self.cut.paths, self.cut.positions, strict=True):
            own = self.params[j] | self.states[j]
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), own)
            found |= {(*path, *inner): variable for inner, variable in shapes.items()}
        return as_state(found)

    def differentiate(self, fn: Callable[..., Any], scaler: LossScale, *inputs: Array) -> Gradients:
        """Return gradients of ``fn(model, *inputs) -> [ ]`` by the Variables around the stack, and by ``inputs``."""

        def of_layer(path: Any, value: Any) -> bool:
            return self.cut.layer_of(path) is not None

        nothing = nnx.State({})
        graphdef, layers, params, states = nnx.split(self.outer_model(), of_layer, nnx.Param, QuantizerState)
        # Outside of the stack devices sum at once: few parameters there belong to layers.
        return gradients.differentiate(
            lambda *args: (fn(*args), None),
            (graphdef, params, states, layers),
            lambda model: (None, nothing, nothing, nothing),
            scaler,
            inputs=inputs,
            kernels=self.program.kernels._replace(once=False),
        )

    def microbatch(self, number: Array) -> tuple[PyTree, Array]:
        """Return a microbatch and its key."""
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), self.batches)
        return batch, jax.random.fold_in(self.key, number)

    def call(self, model: Any, number: Array) -> StackCall:
        """Return the call of the stack for a microbatch."""
        call = call_of_stack(lambda: self.program.loss_fn(model, *self.microbatch(number)))
        assert call is not None
        return call

    def _check_arrays(self) -> None:
        """Raise ValueError if parameters around the stack affect its layers other than through its input."""

        def arrays(values: list[Array]) -> list[Array]:
            outer = jax.tree.unflatten(treedef, values)
            model = nnx.merge(self.program.graphdef, as_state(outer), as_state(self.outer_states), self._placeholders())
            found, _ = arguments(self.call(model, jnp.int32(0)))
            return [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        values, treedef = jax.tree.flatten(self.outer)
        if any(depends(arrays, values)[0]):
            raise ValueError(
                "arguments of the layers, such as a bias of attention scores, are computed from parameters, and stages "
                "of a pipeline pass on gradients of their input alone; take a mesh without a pipeline axis"
            )

    def loss(self, model: Any, number: Array, stack: Callable[[StackCall], Array]) -> Array | WeightedMean:
        """Return the loss of a microbatch, with ``stack`` in place of the layers."""
        with replace_stack(stack):
            return self.program.loss_fn(model, *self.microbatch(number))

    def _weights(self) -> Array | None:
        """Return the weight of each microbatch, fp32 ``[m]``; None for a loss without weights."""

        def weight(number: Array) -> Array | None:
            # It depends only on the labels, so the compiler drops everything else.
            value = self.loss(self.outer_model(), number, lambda call: call.x)
            return jnp.asarray(value.weight, jnp.float32) if isinstance(value, WeightedMean) else None

        return jax.lax.map(weight, jnp.arange(self.schedule.microbatches))

    def weighted(self, tree: PyTree, number: Array) -> PyTree:
        """Return arrays times the weight of a microbatch."""
        weights = self.weights
        return tree if weights is None else jax.tree.map(lambda leaf: leaf * weights[number], tree)


def arguments(call: StackCall) -> tuple[dict[str, Any], Array | None]:
    """Return the stack's array arguments other than its input, and its layers' keys as one array."""
    arrays = {name: value for name, value in call.options.items() if is_array_tree(value)}
    keys: Any = call.keys
    return arrays, None if keys[0] is None else jnp.stack(keys)


def depends(fn: Callable[..., list[Array]], *args: Any) -> tuple[list[bool], list[Any]]:
    """Return whether each result of ``fn`` depends on the arguments, and the results' shapes."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    reached = set(closed.jaxpr.invars)

    def is_reached(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in reached  # a literal cannot be hashed

    for equation in closed.jaxpr.eqns:
        if any(map(is_reached, equation.invars)):
            reached.update(equation.outvars)
    return [is_reached(atom) for atom in closed.jaxpr.outvars], shapes


def as_state(flat: Flat) -> nnx.State:
    """Return Variables by path as an ``nnx.State``."""
    return nnx.from_flat_state(flat.items())
