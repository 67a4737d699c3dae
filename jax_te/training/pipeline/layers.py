"""The layers of one stage of a pipeline, in chunks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import aux_losses_scaled, quantize_kernels, use_cached_kernels
from jax_te.models import StackInput
from jax_te.training.deferred import deferred_vjp, with_summands
from jax_te.training.differentiation import vjp_of_model
from jax_te.training.kernel_gradients import Path, SummandPlace
from jax_te.training.pipeline.cut import Flat, as_state
from jax_te.training.pipeline.loss import StackArrays
from jax_te.training.pipeline.mesh import PIPELINE_AXIS
from jax_te.training.pipeline.program import Program
from jax_te.typing import Array, PyTree


class StageLayers:
    """Layers of one stage, inside of a ``shard_map`` over the pipeline axis.

    Args:
        program: program of all stages.
        params, states: parameters and quantizer states of the stage's layers, by their path in a chunk, ``[v, ...]``.

    Attributes:
        summand_places: places of summands, for the kernels of a chunk whose gradients are summed over devices once a
            step.
    """

    def __init__(self, program: Program, params: Flat, states: Flat):
        self.program, self.schedule = program, program.schedule
        self.params, self.states = params, states
        index, cut = jax.lax.axis_index(PIPELINE_AXIS), program.cut
        self._runs, self._numbers = (jnp.asarray(table)[index] for table in (cut.runs, cut.numbers))
        self.summand_places = self._find_summand_places()
        self._cached = self._quantized_kernels() if program.accumulation.keep_kernels else None

    def chunk(self, tree: PyTree, chunk: Array | int) -> PyTree:
        """Return one chunk of leaves ``[v, ...]``."""
        if self.schedule.virtual_stages == 1:
            return jax.tree.map(lambda leaf: leaf[0], tree)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chunk, keepdims=False), tree)

    def _modules(self, chunk: Array | int) -> Any:
        """Return the ``nnx.List`` of a chunk's layers."""
        own = self.chunk((self.params, self.states), chunk)
        return nnx.merge(self.program.cut.graphdef, *map(as_state, own))

    def _find_summand_places(self) -> dict[Path, SummandPlace]:
        layers = self._modules(0)
        return self.program.accumulation.kernels.summand_places(layers, nnx.state(layers, nnx.Param))

    def _quantized_kernels(self) -> Any:
        """Return the stage's `KernelCache`, ``[v, ...]``."""
        caches = [quantize_kernels(self._modules(chunk)) for chunk in range(self.schedule.virtual_stages)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)

    def forward(self, chunk: Array | int, given: StackArrays) -> tuple[Array, PyTree]:
        """Return the output ``[b, s, h]`` of a chunk of layers, and its backward pass by ``(x, learned)``.

        The backward pass is `deferred_vjp`'s if kernel gradients are deferred, else `vjp_of_model`'s.
        """
        layers = self._modules(chunk)
        if self._cached is not None:
            use_cached_kernels(layers, self.chunk(self._cached, chunk))
        run = functools.partial(self._run, chunk, self._runs[chunk], given)
        # Kernel gradients that need not be deferred are computed in the ordinary way, which has no restrictions.
        inputs, kernels = (given.x, given.learned), self.program.accumulation.kernels
        if self.schedule.defers_weights:
            y, backward = deferred_vjp(run, layers, inputs, wgrad_dtype=kernels.dtype)
            backward = with_summands(backward, self.summand_places)
        else:
            y, backward = vjp_of_model(run, layers, inputs, kernels)
        _check_same_kind(given.x, y)
        return y, backward

    def _run(
        self, chunk: Array | int, runs: Array, given: StackArrays, layers: Any, inputs: tuple[Array, dict[str, Any]]
    ) -> Array:
        """Return the output of a chunk's layers for ``inputs``: ``(x, learned)``; ``runs`` see `Cut`, bool ``[l]``."""
        x, learned = inputs
        keys: list[Array | None] = [None] * len(layers)
        if given.keys is not None:
            keys = [given.keys[number] for number in self._numbers[chunk]]
        with aux_losses_scaled(layers, self.program.aux_scale):
            for positions, own in self.program.cut.segments():
                stack = StackInput(x, keys[positions], given.arrays, learned, self.program.options)
                part = list(layers)[positions]
                if own:
                    x = stack.output(part)
                else:
                    # An idle layer runs, too, in the time that other stages need for theirs.
                    y = _read_if(runs[positions.start], stack).output(part)
                    x = jnp.where(runs[positions.start], y, x)
        return x


def _read_if(runs: Array, stack: StackInput) -> StackInput:
    """Return the input of a layer that counts if ``runs``, bool ``[]``; no gradient of an idle one passes on.

    The cotangent of an idle layer's output is 0, but losses of its routers have gradients whatever that is.
    """
    arrays = stack.x, stack.learned
    x, learned = jax.tree.map(lambda leaf: jnp.where(runs, leaf, jax.lax.stop_gradient(leaf)), arrays)
    return dataclasses.replace(stack, x=x, learned=learned)


def _check_same_kind(x: Array, y: Array) -> None:
    """Raise ValueError if layers get and give different kinds of activations."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"stages of a pipeline pass on activations of one kind, and the layers get {x.dtype}{list(x.shape)} "
            f"and give {y.dtype}{list(y.shape)}; cast the stack's input, or take a mesh without a pipeline axis"
        )
