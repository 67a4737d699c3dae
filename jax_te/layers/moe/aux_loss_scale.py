"""The factors by which a loss is scaled, for the losses of a model's routers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.moe.router import Router
from jax_te.typing import Array


class AuxLossScale(nnx.Variable):
    """NNX Variable of the factor by which the model's loss is scaled while it is differentiated, fp32 ``[]``."""


@checked
def set_aux_loss_scale(model: nnx.Module, scale: Array | float | None) -> None:
    """Set the factor of the routers' losses: that by which a loss function multiplies the model's loss.

    A loop of your own that differentiates ``factor * loss``, for a loss scale or the mean over microbatches, sets this
    ``factor`` before that. It is a Variable of the model, and so an argument of a function that ``nnx.jit`` compiled,
    which takes another value without tracing again. `jax_te.training.make_train_step`, also on a
    pipeline, and `jax_te.training.value_and_grad` multiply by their scaler's scale, and take means over microbatches,
    by themselves: there it is the factor that ``loss_fn`` has on top of these.

    Args:
        model: changed in place.
        scale: ``[]``; None: 1.

    Source: ``megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler.set_loss_scale``.

    >>> from jax_te.config import RouterOptions
    >>> router = Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))
    >>> set_aux_loss_scale(router, 1024.0)
    >>> float(router.loss_scale.get_value())
    1024.0
    """
    for router in routers_of(model).values():
        router.loss_scale = nnx.data(_scale_of(router, scale))


def has_aux_loss_scale(model: nnx.Module) -> bool:
    """Return whether `set_aux_loss_scale` gave a factor to a router of a model.

    >>> from jax_te.config import RouterOptions

    >>> has_aux_loss_scale(Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0)))
    False
    """
    return any(router.loss_scale is not None for router in routers_of(model).values())


def _scale_of(router: Router, scale: Array | float | None) -> AuxLossScale | None:
    # Routers that nnx.vmap stacked have one each, which a loop over the stack takes apart.
    stack = router.last_step.get_value().shape[:-1]
    return None if scale is None else AuxLossScale(jnp.broadcast_to(jnp.asarray(scale, jnp.float32), stack))


def routers_of(model: nnx.Module) -> dict[str, Router]:
    """Return the routers of a model by their paths.

    >>> from jax_te.config import RouterOptions

    >>> list(routers_of(Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))))
    ['']
    """
    modules = nnx.iter_modules(model)
    return {".".join(map(str, path)): module for path, module in modules if isinstance(module, Router)}


@contextlib.contextmanager
def aux_losses_scaled(model: nnx.Module, scale: Array | float) -> Iterator[None]:
    """Yield with the losses of a model's routers scaled as a loss scaler scales its loss, unless that is by 1.

    The factor of `set_aux_loss_scale` stays, and both are multiplied.

    >>> from jax_te.config import RouterOptions
    >>> router = Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))
    >>> with aux_losses_scaled(router, 2.0):
    ...     float(router.scaler_scale.get_value())
    2.0
    """
    if isinstance(scale, float) and scale == 1.0:
        yield
        return
    before = [(router, router.scaler_scale) for router in routers_of(model).values()]
    for router, _ in before:
        router.scaler_scale = nnx.data(_scale_of(router, scale))
    try:
        yield
    finally:
        for router, scale_before in before:
            router.scaler_scale = nnx.data(scale_before)
