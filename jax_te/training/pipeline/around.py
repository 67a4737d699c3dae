"""The parts before and after a pipeline's layers, whose parameters every stage has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import aux_losses_scaled
from jax_te.quantize import QuantizerState
from jax_te.training.differentiation import Differentiated, Differentiation, Gradients, differentiate
from jax_te.training.loss import WeightedMean
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.pipeline.cut import Flat, as_state
from jax_te.training.pipeline.loss import StackArrays, arrays_of, without_gradient
from jax_te.training.pipeline.program import Program
from jax_te.training.state import SplitModel
from jax_te.typing import Array, PyTree


class AroundLayers:
    """Parts of a `PipelinedLoss` before and after the layers, on the microbatches of a step.

    Args:
        program: program of all stages.
        params, states: parameters and quantizer states that belong to no layer.
        batches: microbatches, leaves ``[m, b / m, ...]``.
        key: random key of the step.

    Attributes:
        weights: weight of each microbatch, fp32 ``[m]``; None for a loss without weights.
    """

    def __init__(self, program: Program, params: Flat, states: Flat, batches: PyTree, key: Array):
        self.program, self.params, self.states = program, params, states
        self.batches, self.key = batches, key
        self.weights = self._weights() if program.weighted else None

    def _microbatch(self, number: Array) -> tuple[PyTree, Array]:
        """Return a microbatch and its key."""
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), self.batches)
        return batch, jax.random.fold_in(self.key, number)

    def _model(self) -> Any:
        """Return the model; the Variables of its layers hold shapes."""
        return nnx.merge(self.program.graphdef, *map(as_state, (self.params, self.states, self.program.layers)))

    def stack_input(self, number: Array) -> StackArrays:
        """Return the layers' input for a microbatch."""
        return arrays_of(self.program.loss.embed_inputs(self._model(), *self._microbatch(number)))

    def loss_gradients(self, y: Array, number: Array) -> tuple[Gradients, Array]:
        """Return loss and gradients of the part after the layers by the Variables there, and the gradient by ``y``."""

        def after(model: Any, y: Array) -> Array | WeightedMean:
            value = self.program.loss.compute_loss(model, y, *self._microbatch(number))
            if not isinstance(value, WeightedMean):
                return value
            return value._replace(weight=without_gradient(jnp.asarray(value.weight), _WEIGHT))

        result = self._differentiate(after, self.program.scaler, self.program.accumulation.share, y)
        return result.gradients, result.inputs[0]

    def input_gradients(self, number: Array, given: tuple[Array, dict[str, Any]]) -> Gradients:
        """Return gradients of the part before the layers, whose results' gradients are ``given``: ``(x, learned)``."""

        def before(model: Any) -> Array:
            # The gradients are those of a loss that is scaled already.
            with aux_losses_scaled(model, self.program.aux_scale):
                stack = self.program.loss.embed_inputs(model, *self._microbatch(number))
            without_gradient(dict(stack.arrays), _ARRAYS)  # for its error
            products = jax.tree.map(
                lambda value, gradient: jnp.sum(value.astype(jnp.float32) * gradient.astype(jnp.float32)),
                (stack.x, dict(stack.learned)),
                given,
            )
            return sum(jax.tree.leaves(products), jnp.float32(0.0))

        return self._differentiate(before, ConstantLossScale(), 1.0).gradients

    def _differentiate(self, fn: Callable[..., Any], scaler: LossScale, share: float, *inputs: Array) -> Differentiated:
        """Return gradients of ``fn(model, *inputs) -> [ ]`` by the Variables around the layers, and by ``inputs``."""
        graphdef, layers, params, states = nnx.split(
            self._model(), lambda path, value: path in self.program.layers, nnx.Param, QuantizerState
        )
        differentiation = Differentiation(
            rest_of=lambda model: nnx.State({}),
            scaler=scaler,
            # Around the layers devices sum at once: few parameters there are kernels.
            kernels=self.program.accumulation.kernels._replace(once=False),
            share=share,
        )
        parts = SplitModel(graphdef, params, states, rest=layers)
        return differentiate(lambda *args: (fn(*args), None), parts, differentiation, inputs)

    def _weights(self) -> Array:
        """Return the weight of each microbatch, fp32 ``[m]``."""
        y = jnp.zeros(self.program.inputs.x.shape, self.program.inputs.x.dtype)

        def weight(number: Array) -> Array:
            # It depends only on the batch, so the compiler drops everything else.
            value: Any = self.program.loss.compute_loss(self._model(), y, *self._microbatch(number))
            return jnp.asarray(value.weight, jnp.float32)

        return jax.lax.map(weight, jnp.arange(self.program.schedule.microbatches))

    def weighted(self, tree: PyTree, number: Array) -> PyTree:
        """Return arrays times the weight of a microbatch."""
        weights = self.weights
        return tree if weights is None else jax.tree.map(lambda leaf: leaf * weights[number], tree)


_WEIGHT = (
    "the weight of the WeightedMean that compute_loss gives depends on the layers' output or on parameters, and a "
    "pipeline's stages need it before they have these; compute it from the batch, or take a mesh without a pipeline "
    "axis"
)
_ARRAYS = (
    "arrays of the StackInput that embed_inputs gives depend on parameters, and no gradient would reach these; give "
    "them as learned, StackInput(x, learned={...})"
)
