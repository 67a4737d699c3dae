"""Forward and backward pass of a stage's chunks of layers, from one trace, with residuals that a loop can carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun

from jax_te.training.pipeline.layers import StageLayers
from jax_te.training.pipeline.loss import StackArrays
from jax_te.typing import Array


class ChunkPasses:
    """Forward and backward pass of a chunk as a program traced once, with residuals as buffers that a loop carries.

    Args:
        layers: layers of the stage.
        key: any random key.

    Attributes:
        residuals: shapes of the residuals that differ between microbatches; others, e.g. kernels, are not stored.
        weight_operands: shapes of the operands of deferred kernel gradients; empty where these are not deferred.
        weight_treedef: structure of the function that computes these gradients, a pytree of its operands.
    """

    def __init__(self, layers: StageLayers, key: Array):
        self._layers = layers
        self._treedef: Any = None
        given = layers.program.inputs

        def forward(chunk: Array, given: StackArrays) -> list[Array]:
            y, backward = layers.forward(chunk, given)
            # Not an array, so it cannot be a result of make_jaxpr: set while the passes are traced.
            leaves, self._treedef = jax.tree.flatten(backward)
            return [y, *leaves]

        closed, (_, *shapes) = jax.make_jaxpr(forward, return_shape=True)(jnp.int32(0), given)
        self._closed = closed
        self._varies = _reached(closed.jaxpr, first=1)[1:]
        self._keys = [_key_impl(shape) for shape in shapes]
        self.residuals = jax.eval_shape(lambda leaves: self._chosen(leaves, varying=True), shapes)
        self._fixed = self._computed_once(given, key)
        self.weight_operands, self.weight_treedef = [], None
        if layers.schedule.defers_weights:
            half = jax.eval_shape(lambda leaves, dy: jax.tree.unflatten(self._treedef, leaves)(dy), shapes, given.x)
            self.weight_operands, self.weight_treedef = jax.tree.flatten(half.backward_dw)

    def _computed_once(self, given: StackArrays, key: Array) -> list[Array]:
        """Return the residuals that do not differ between microbatches, ``[v, ...]``."""
        # Of inputs that do not matter, so the compiler drops what would come of them.
        zeros: Any = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), given._replace(keys=None))
        keys = None if given.keys is None else jax.random.split(key, given.keys.shape[0])
        of_chunks = []
        for chunk in range(self._layers.schedule.virtual_stages):
            _, *leaves = self._run(jnp.int32(chunk), zeros._replace(keys=keys))
            of_chunks.append(self._chosen(leaves, varying=False))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_chunks)

    def _run(self, chunk: Array, given: StackArrays) -> list[Array]:
        results = jaxpr_as_fun(self._closed)(*jax.tree.leaves((chunk, given)))
        # Constants are NumPy's.
        return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in results]

    def forward(self, chunk: Array, given: StackArrays) -> tuple[Array, list[Array]]:
        """Return a chunk's output, and the residuals that differ between microbatches, as arrays of numbers."""
        y, *leaves = self._run(chunk, given)
        return y, self._chosen(leaves, varying=True)

    def _chosen(self, leaves: list[Array], *, varying: bool) -> list[Array]:
        chosen = [leaf for leaf, varies in zip(leaves, self._varies, strict=True) if varies == varying]
        return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in chosen]

    def backward(self, residuals: list[Array], chunk: Array) -> Callable[[Array], Any]:
        """Return the backward pass whose residuals of `forward` are given."""
        fixed, varying = iter(self._layers.chunk(self._fixed, chunk)), iter(residuals)
        leaves = [next(varying if varies else fixed) for varies in self._varies]
        typed = [
            leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)
            for leaf, key in zip(leaves, self._keys, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, typed)


def _reached(jaxpr: Jaxpr, *, first: int) -> list[bool]:
    """Return whether each result depends on the arguments from the ``first`` on."""
    reached = set(jaxpr.invars[first:])

    def is_reached(atom: Var | Literal) -> bool:
        return not isinstance(atom, Literal) and atom in reached  # a literal cannot be hashed

    for equation in jaxpr.eqns:
        if any(map(is_reached, equation.invars)):
            reached.update(equation.outvars)
    return [is_reached(atom) for atom in jaxpr.outvars]


def _key_impl(shape: Any) -> Any:
    """Return the implementation of random keys; None for other arrays."""
    return jax.random.key_impl(jnp.zeros((), shape.dtype)) if _is_key(shape) else None


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
