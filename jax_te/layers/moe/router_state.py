"""Updates of a router's states: once a step, from the counts of its calls.

States of routers that ``nnx.vmap`` stacked have axes in front, and each goes on by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jax_te.quantize import Counting
from jax_te.typing import Array


@dataclass(frozen=True)
class ExpertBias(Counting):
    """The bias ``[e]`` of each expert's scores: it grows for experts with fewer tokens than the mean, and shrinks for
    experts with more.

    Args:
        rate: size of a step.

    Source: ``megatron.core.transformer.moe.moe_utils.get_updated_expert_bias``; Wang et al. 2024, "Auxiliary-loss-free
    load balancing strategy for mixture-of-experts".

    >>> ExpertBias(0.5).advance(jnp.zeros(2), jnp.array([3.0, 1.0])).tolist()
    [-0.5, 0.5]
    """

    rate: float

    def advance(self, old: Array, total: Array) -> Array:
        """Return the bias of the next step from the tokens of each expert."""
        return old + self.rate * jnp.sign(jnp.mean(total, axis=-1, keepdims=True) - total)


@dataclass(frozen=True)
class QuantileBias(Counting):
    """The bias ``[e]`` of quantile balancing, followed by a 0: ``[e + 1]``, the shape of the calls' sum of quantiles
    and number of calls.

    Args:
        ema: share of the old bias in the new one.

    Source: ``megatron.core.distributed.finalize_model_grads``.

    >>> QuantileBias(0.0).advance(jnp.zeros(3), jnp.array([6.0, 2.0, 2.0])).tolist()
    [1.0, -1.0, 0.0]
    """

    ema: float

    def advance(self, old: Array, total: Array) -> Array:
        """Return the bias of the next step from the sum of the quantiles and their number."""
        calls = total[..., -1:]
        mean = total[..., :-1] / jnp.maximum(calls, 1.0)
        new = self.ema * old[..., :-1] + (1.0 - self.ema) * mean
        new = new - jnp.mean(new, axis=-1, keepdims=True)
        new = jnp.concatenate([new, jnp.zeros_like(calls)], axis=-1)
        return jnp.where(calls > 0.0, new, old)


@dataclass(frozen=True)
class CountsSoFar(Counting):
    """The tokens of each expert in a step's microbatches so far, and the number of microbatches: ``[e + 1]``.

    Each step begins at 0.

    >>> CountsSoFar().so_far(jnp.zeros(2), jnp.array([4.0, 1.0])).tolist()
    [4.0, 1.0]
    """

    within_step: ClassVar[bool] = True
    persistent: ClassVar[bool] = False

    def advance(self, old: Array, total: Array) -> Array:
        """Return zeros."""
        return jnp.zeros_like(old)

    def so_far(self, old: Array, total: Array) -> Array:
        """Return the counts of the step's earlier microbatches."""
        return old + total


@dataclass(frozen=True)
class LastStep(Counting):
    """Counts of the last step, for metrics.

    >>> LastStep().advance(jnp.ones(1), jnp.zeros(1)).tolist()
    [0.0]
    """

    needed: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    def advance(self, old: Array, total: Array) -> Array:
        """Return the counts of the step that ends."""
        return total
