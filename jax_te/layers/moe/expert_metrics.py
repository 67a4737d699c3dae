"""Metrics of the counts that a train step made in the routers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.moe.aux_loss_scale import routers_of
from jax_te.layers.moe.router import Router
from jax_te.typing import Array

TOKENS = "tokens_per_expert"
"""Name of the one metric that is a vector."""


@checked
def expert_metrics(model: nnx.Module) -> dict[str, Array]:
    """Return the counts of the last step, over all routers of a model and for each.

    Args:
        model: model whose states a train step has written back, e.g. ``state.model``.

    Returns:
        fp32 values by name: each loss, the mean over calls and layers; ``dropped_share``, of all choices of experts;
        ``overflow_share``, likewise, of those for which a device of a mesh had no room, if there is a bound;
        ``max_over_mean_load``, the largest load of an expert over the mean one, in the layer where that is largest.
        For each router, prefixed with its path and a ``/``: the same, and ``tokens_per_expert [e]``. The path of a
        router that ``nnx.vmap`` stacked ends with its index, as in ``layers.router[2]``. Empty without routers.

    >>> from jax_te.config import RouterOptions
    >>> router = Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))
    >>> sorted(expert_metrics(router))
    ['/dropped_share', '/max_over_mean_load', '/tokens_per_expert', 'dropped_share', 'max_over_mean_load']
    """
    found, layers = {}, []
    for path, _, load, own in _counts(model):
        layers.append(own)
        found |= {f"{path}/{name}": value for name, value in own.items()} | {f"{path}/{TOKENS}": load}
    for name in {name: None for own in layers for name in own}:
        each = jnp.stack([own[name] for own in layers if name in own])
        found[name] = jnp.max(each) if name == "max_over_mean_load" else jnp.mean(each)
    return found


def step_metrics(model: nnx.Module) -> dict[str, Array]:
    """Return the metrics of `expert_metrics` that a train step reports, under ``experts/``.

    They are the metrics over all routers, and ``tokens_per_expert [e]`` of each router; all of a router's metrics if
    its options have ``per_layer_logging``.

    >>> from jax_te.config import RouterOptions
    >>> router = Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))
    >>> sorted(step_metrics(router))
    ['experts/dropped_share', 'experts/max_over_mean_load', 'experts/tokens_per_expert']
    """
    if not routers_of(model):
        return {}
    by_itself = {path for path, router, _, _ in _counts(model) if router.options.per_layer_logging}
    found = {}
    for name, value in expert_metrics(model).items():
        path, of_router, metric = name.rpartition("/")
        if not of_router or metric == TOKENS or path in by_itself:
            # A router that is the whole model has no path.
            found[f"experts/{name.removeprefix('/')}"] = value
    return found


def _counts(model: nnx.Module) -> Iterator[tuple[str, Router, Array, dict[str, Array]]]:
    """Yield path, router, load of each expert and the other metrics, for each layer with a router."""
    for path, router in routers_of(model).items():
        values: Any = router.last_step.get_value()
        for place in np.ndindex(values.shape[:-1]):
            name = f"{path}{list(place)}" if place else path
            yield name, router, *_metrics_of(router, values[place])


def _metrics_of(router: Router, values: Array) -> tuple[Array, dict[str, Array]]:
    """Return the load of each expert ``[e]``, and the other metrics, from a router's ``last_step``."""
    e = router.options.num_experts
    load, sums = values[:e], dict(zip(router.metric_names, values[e:], strict=True))
    calls, chosen = jnp.maximum(sums.pop("calls"), 1.0), jnp.maximum(sums.pop("chosen"), 1.0)
    own = {"dropped_share": sums.pop("dropped") / chosen}
    if "overflow" in sums:
        own["overflow_share"] = sums.pop("overflow") / chosen
    own["max_over_mean_load"] = jnp.max(load) / jnp.maximum(jnp.mean(load), 1.0 / e)
    return load, own | {name: total / calls for name, total in sums.items()}
