"""The factor of routers' losses in Linen, whose modules hold none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.layers import set_aux_loss_scale
from jax_te.typing import Array


class _Factor:
    """A factor, equal to itself alone: JAX keeps no trace of a function from one context for another."""

    def __init__(self, value: Array | float):
        self.value = value


_factor = jax.make_user_context(None)


@checked
@contextlib.contextmanager
def aux_losses_scaled(scale: Array | float) -> Iterator[None]:
    """Multiply the losses of routers inside by a factor: that by which a loss function multiplies the model's loss.

    It is `jax_te.layers.set_aux_loss_scale` for Linen. Enter it inside of the function that is differentiated, around
    ``apply``; ``scale`` may be traced.

    Args:
        scale: ``[]``, the loss scale, or one over the number of microbatches whose gradients are added up.

    Raises:
        ValueError: for a ``scale`` that is not a scalar.

    >>> from flax import linen as nn
    >>> from jax_te.config import RouterOptions
    >>> from jax_te.linen import Router, value_and_grad
    >>> layer, x = Router(16, RouterOptions(num_experts=4, aux_loss_coeff=1.0)), jnp.ones((2, 8, 16))
    >>> def loss_fn(variables, scale):
    ...     with aux_losses_scaled(scale):
    ...         return scale * jnp.mean(layer.apply(variables, x).probs ** 2)
    >>> variables = nn.unbox(layer.init(jax.random.key(0), x))
    >>> grads = [value_and_grad(loss_fn)(variables, scale)[1]["params"]["kernel"] for scale in (1.0, 4.0)]
    >>> bool(jnp.allclose(4.0 * grads[0], grads[1]))
    True
    """
    if jnp.shape(scale) != ():
        raise ValueError(f"scale must be a scalar, got shape {jnp.shape(scale)}")
    with _factor(_Factor(scale)):
        yield


def set_ambient_factor(module: nnx.Module) -> None:
    """Give the routers of a module the factor of `aux_losses_scaled`, if there is one."""
    if _factor.value is not None:
        set_aux_loss_scale(module, _factor.value.value)
