"""Residuals that a stage keeps from a forward pass for its backward pass, in buffers that a loop can carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.training.pipeline.stage_model import StageModel, arguments, depends
from jax_te.typing import Array, PyTree


class Residuals:
    """Structure of a chunk's backward pass, found by tracing it once.

    Args:
        model: model of the stage.

    Attributes:
        x: shape of activations between layers.
        residuals: shapes of the residuals that differ between microbatches; others, e.g. kernels, are not stored.
        operands: shapes of the operands of kernel gradients.
        later: structure of the function of `operands`.
    """

    def __init__(self, model: StageModel):
        self._model = model
        self._treedef: Any = None
        call = model.call(model.outer_model(), jnp.int32(0))
        args = jax.eval_shape(lambda: (call.x, *arguments(call)))
        self.x = args[0]

        def leaves(*args: Any) -> list[Array]:
            leaves, self._treedef = jax.tree.flatten(model.forward(0, *args)[1])
            return leaves

        self._varies, shapes = depends(leaves, *args)
        self._keys = [_key_impl(shape) for shape in shapes]
        self.residuals = jax.eval_shape(lambda args: self._chosen(leaves(*args), varying=True), args)
        # The others are computed once, from arbitrary inputs, so the compiler drops the unused results.
        zeros: Any = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), (args[0], args[1]))
        key = None if args[2] is None else jax.random.split(model.key, args[2].shape[0])
        each = []
        for chunk in range(model.schedule.virtual_stages):
            x, arrays = zeros
            found = jax.tree.leaves(model.forward(chunk, x, arrays, key)[1])
            each.append(self._chosen(found, varying=False))
        self._fixed = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        self.operands, self.later = [], None
        if model.schedule.waits:
            dy = jnp.zeros(self.x.shape, self.x.dtype)
            half = jax.eval_shape(lambda args: model.forward(0, *args)[1](dy), args)
            self.operands, self.later = jax.tree.flatten(half.backward_dw)

    def varying(self, backward: PyTree) -> list[Array]:
        """Return the residuals that differ between microbatches, as arrays of numbers."""
        return self._chosen(jax.tree.leaves(backward), varying=True)

    def _chosen(self, leaves: list[Array], *, varying: bool) -> list[Array]:
        chosen = [leaf for leaf, varies in zip(leaves, self._varies, strict=True) if varies == varying]
        return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in chosen]

    def backward(self, residuals: list[Array], chunk: Array) -> Callable[[Array], Any]:
        """Return the backward pass whose `varying` residuals are given."""
        fixed, varying = iter(self._model.chunk(self._fixed, chunk)), iter(residuals)
        leaves = [next(varying if varies else fixed) for varies in self._varies]
        typed = [
            leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)
            for leaf, key in zip(leaves, self._keys, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, typed)


def _key_impl(shape: Any) -> Any:
    """Return the implementation of random keys; None for other arrays."""
    return jax.random.key_impl(jnp.zeros((), shape.dtype)) if _is_key(shape) else None


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
