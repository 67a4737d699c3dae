"""Quantizer state among the variables of a Linen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import unfreeze

from jax_te.linen.variables import KEPT, STATE
from jax_te.quantize import as_float32, with_max_gradients, write_back
from jax_te.quantize.internal import ROLES
from jax_te.recipe import Recipe, autocast


def prepare_quantization(
    model: nn.Module, variables: Mapping[str, Any], recipe: Recipe | None, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``variables`` with fresh state for ``recipe`` in place of the state they have: empty histories, scales 1.

    Use it to quantize a model that was initialized or loaded without a recipe, and to change the recipe of a running
    one. Kernels kept between microbatches are dropped; everything else stays, Flax's own FP8 state included. The
    result has the collection ``_overwrite_with_gradient`` always, empty where there is no state, so that Flax's
    ``TrainState`` treats it alike before and after: create it from what this gives, with recipe None for a start in
    bf16.

    Args:
        model: any Linen model that `jax_te.linen`'s layers are in. It is traced, under ``recipe``, not run.
        variables: of the model.
        recipe: None and recipes without state remove the state.
        args, kwargs: what ``model.init`` takes after its ``rngs``.

    Raises:
        ValueError: for a recipe with state, if nothing in the model can be quantized by it.

    >>> from jax_te.linen import Linear
    >>> from jax_te.recipe import DelayedScaling
    >>> layer, x = Linear(16, 16), jnp.ones((16, 16))
    >>> variables = prepare_quantization(layer, layer.init(jax.random.key(0), x), DelayedScaling(), x)
    >>> variables["_overwrite_with_gradient"]["quantizers"]["x"]["scale"]
    Array(1., dtype=float32)
    """
    found: dict[str, Any] = unfreeze(dict(variables))
    found.pop(KEPT, None)
    states = _without_states(found.get(STATE, {}))
    if recipe is not None and recipe.has_state:
        with autocast(recipe):  # jitted for what it leaves out: the parameters, and the call
            fresh = jax.jit(lambda: unfreeze(model.init(jax.random.key(0), *args, **kwargs)).get(STATE, {}))()
        if not any(map(_is_state, jax.tree.leaves(fresh, is_leaf=_is_state))):
            raise ValueError(
                f"{type(model).__name__} has no layer that {recipe} could quantize; the layers of jax_te.linen with "
                "kernels are: Linear, LayerNormLinear, LayerNormMLP and what is built from them"
            )
        states = _merged(fresh, states)
    return {**found, STATE: states}


def value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """As ``jax.value_and_grad``, with the rules for quantizer state that a plain gradient does not keep.

    The gradient of a state is its next value. Where a layer is called twice in one forward pass, ``jax.grad`` adds two
    next values up; here they merge by maximum. Where a layer is not called, it gives zeros; here the state that there
    is. A model that calls each of its layers once is differentiated by both alike. Use it inside ``jax.jit``: outside,
    every call compiles anew.

    Args:
        loss_fn: ``(params, ...) -> [ ]``, of ``params`` with the collections ``params`` and
            ``_overwrite_with_gradient``, as Flax's ``TrainState`` holds them.
        has_aux: ``loss_fn`` gives a pair, of which the second, a pytree of arrays, is passed on.

    Returns:
        A function of the same arguments that gives the value and the gradients with respect to the first of them.

    >>> from jax_te.linen import Linear
    >>> from jax_te.recipe import DelayedScaling, autocast
    >>> layer, x = Linear(16, 16), jnp.ones((16, 16))
    >>> def loss_fn(variables):
    ...     return jnp.sum(layer.apply(variables, layer.apply(variables, x)))
    >>> with autocast(DelayedScaling(amax_history_len=1)):
    ...     variables = layer.init(jax.random.key(0), x)
    ...     loss, grads = value_and_grad(loss_fn)(variables)
    >>> grads["_overwrite_with_gradient"]["quantizers"]["x"]["amax_history"].tolist()
    [1.0]
    """

    def differentiate(params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # allow_int: the dtype of with_max_gradients is no ordinary float.
        plain = jax.value_and_grad(loss_fn, has_aux=has_aux, allow_int=True)

        @jax.jit  # a concrete array cannot have that dtype
        def merged(params: Mapping[str, Any]) -> Any:
            states = params[STATE]
            value, grads = plain({**params, STATE: _map_states(with_max_gradients, states)}, *args, **kwargs)
            after = _map_states(lambda old, new: write_back(old, as_float32(new)), states, grads[STATE])
            return value, {**grads, STATE: after}

        return merged(params) if STATE in params else plain(params, *args, **kwargs)

    return differentiate


def _is_state(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == set(ROLES)


def _map_states(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``fn`` of our states; of what else is in the collection, e.g. Flax's own FP8 state, the last tree's."""
    return jax.tree.map(lambda *nodes: fn(*nodes) if _is_state(nodes[0]) else nodes[-1], tree, *rest, is_leaf=_is_state)


def _without_states(tree: dict[str, Any]) -> dict[str, Any]:
    """What is not ours in the collection."""
    kept = {
        name: _without_states(node) if isinstance(node, dict) else node
        for name, node in tree.items()
        if not _is_state(node)
    }
    return {name: node for name, node in kept.items() if not isinstance(node, dict) or node}


def _merged(fresh: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Both, and of what both have ``kept``'s."""
    both = {n: _merged(fresh[n], kept[n]) for n in fresh.keys() & kept.keys() if isinstance(fresh[n], dict)}
    return {**fresh, **kept, **both}
