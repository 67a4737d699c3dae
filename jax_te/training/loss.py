"""What a loss function returns: a mean, or two sums of which it is the quotient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te._validation import has_shape_and_dtype
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
"""``loss_fn(model, batch, key)``: the mean loss over a batch, a scalar or a `WeightedMean`, which also gives the weight
of the batch. ``key`` is None in evaluation: no dropout."""


_NO_AUX = (
    "it has no auxiliary output: make_train_step keeps what loss_fn assigns to a Variable that the model's constructor "
    "makes, in state.model (not in a pipeline), and a step of your own with "
    "jax_te.value_and_grad(loss_fn, has_aux=True) returns any value"
)


def mean_loss(loss: Any) -> Array:
    """Return the result of a `LossFn` as fp32 ``[]``.

    Raises:
        TypeError: if it is neither an array nor a `WeightedMean`.
        ValueError: if it is not a scalar.
    """
    check_is_loss(loss, _NO_AUX)
    mean = loss.mean if isinstance(loss, WeightedMean) else loss
    if jnp.shape(mean) != ():
        raise ValueError(f"loss_fn must give a scalar, the mean loss of its batch, got shape {jnp.shape(mean)}")
    return jnp.asarray(mean, jnp.float32)


def check_is_loss(loss: Any, remedy: str) -> None:
    """Raise TypeError for a result of a loss function that is neither an array nor a `WeightedMean`.

    Args:
        loss: result.
        remedy: what to do with a second value, for results of several values.
    """
    total = loss.total if isinstance(loss, WeightedMean) else loss
    # A number of Python is none either, as in flax.nnx.value_and_grad: no gradient passes through it.
    if not has_shape_and_dtype(total):
        several = isinstance(total, tuple | list | Mapping)
        raise TypeError(
            "loss_fn must return a scalar array or a WeightedMean, got "
            f"{'' if total is loss else 'a WeightedMean whose total is of type '}{type(total).__name__}"
            f"{f'; {remedy}' if several else ''}"
        )


def check_differentiable(loss: Any) -> None:
    """Raise TypeError for a loss that is not an array, or of integers, whose gradients would all be zeros."""
    check_is_loss(loss, _NO_AUX)
    dtype = jnp.result_type(loss.total if isinstance(loss, WeightedMean) else loss)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss_fn must give a loss of floating-point numbers to differentiate, got {dtype}")
