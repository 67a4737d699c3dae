"""Quantizer state among the variables of a Linen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.fp8_ops import fp32_max_grad

from jax_te._validation import checked
from jax_te.linen.counting import RulesOfStates, rules_of_states
from jax_te.linen.variables import CACHED, STATE
from jax_te.quantize import USES, as_float32, is_amax_state, with_max_gradients, write_back
from jax_te.recipe import Recipe, autocast
from jax_te.training import gradients_or_nan, loss_or_nan, outcome_of
from jax_te.typing import Array


@checked
def prepare_quantization(
    model: nn.Module, variables: Mapping[str, Any], recipe: Recipe | None, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Return ``variables`` with new state for ``recipe`` in place of their present state: empty histories, scales 1.

    Use it to quantize a model that was initialized or loaded without a recipe, and to change the recipe of a running
    one. Cached kernels are dropped; everything else stays, Flax's own FP8 state included. The result always has the
    collection ``_overwrite_with_gradient``, empty if there is no state, so that the structure of Flax's ``TrainState``
    does not change with the recipe: create the ``TrainState`` from this result, with recipe None for a start in bf16.

    Args:
        model: a Linen model with layers of `jax_te.linen`. It is traced under ``recipe``, not run.
        variables: variables of the model.
        recipe: None and recipes without state remove the state.
        args, kwargs: arguments of ``model.init`` after its ``rngs``.

    Raises:
        ValueError: for a recipe with state, if the model has no layer that it could quantize.

    >>> from jax_te.linen import Linear
    >>> from jax_te.recipe import DelayedScaling
    >>> layer, x = Linear(16, 16), jnp.ones((16, 16))
    >>> variables = prepare_quantization(layer, layer.init(jax.random.key(0), x), DelayedScaling(), x)
    >>> variables["_overwrite_with_gradient"]["quantizers"]["x"]["scale"]
    Array(1., dtype=float32)
    """
    found: dict[str, Any] = unfreeze(dict(variables))
    found.pop(CACHED, None)  # quantized as the old recipe does it
    states = _without_states(found.get(STATE, {}))
    if recipe is not None and recipe.has_state:
        # Under jit the compiler drops everything but the states: neither parameters nor activations are computed.
        with autocast(recipe):
            fresh = jax.jit(lambda: unfreeze(model.init(jax.random.key(0), *args, **kwargs)).get(STATE, {}))()
        if not any(map(_is_state, jax.tree.leaves(fresh, is_leaf=_is_state))):
            raise ValueError(
                f"{type(model).__name__} has no layer that recipe {recipe.name!r} could quantize; the layers "
                "of jax_te.linen with kernels are: Linear, LayerNormLinear, LayerNormMLP and what is built from them"
            )
        states = _merged(fresh, states)
    return {**found, STATE: states}


@checked
def value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Differentiate like ``jax.value_and_grad``, and merge the next values of quantizer states by their own rules.

    The gradient of a state is its next value, also that of an expert bias or of a router's counts. For a layer that is
    called twice in one loss, ``jax.grad`` adds two next values up; here scales merge by maximum, and a router's next
    value is computed once, from the counts of both calls. For a layer that is not called, ``jax.grad`` returns zeros;
    here the old state, and so for any other variable of the collection whose gradient is zero and that no layer here
    has read, such as another package's. For a model that calls each of its layers once the two agree, but for a step
    that is lost. Use it inside ``jax.jit``: outside, every call compiles anew.

    If loss, the norm of the gradients or an amax of a tensor that was quantized is not finite, all states stay as they
    were. If the amax is not, the loss is nan, and if the loss is not, so are all gradients: ``optax.apply_if_finite``
    skips the step. Other collections that the loss function returns are the caller's to keep, such as
    ``jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(loss), new, old), new, old)``.

    Args:
        loss_fn: ``(params, ...) -> [ ]``; ``params`` has the collections ``params`` and ``_overwrite_with_gradient``,
            as Flax's ``TrainState`` holds them.
        has_aux: whether ``loss_fn`` returns a pair whose second element, a pytree of arrays, is passed on.

    Returns:
        A function of the same arguments that returns the value, and the gradients with respect to the first argument,
        in the same containers (a ``FrozenDict`` for a ``FrozenDict``).

    Raises:
        TypeError: when called, if the first argument is not a mapping of collections, such as an NNX model.
        ValueError: when called, for a loss that applies parts of a model whose routers have different rules under the
            same names, or renames a router's states.

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

    def differentiate(params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_variables(params)
        if STATE not in params:
            value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *args, **kwargs)
            return value, gradients_or_nan(grads, value[0] if has_aux else value)
        # allow_int: JAX does not count the dtype of with_max_gradients among the floats.
        plain = jax.value_and_grad(loss_fn, has_aux=has_aux, allow_int=True)

        @jax.jit  # a concrete array cannot have that dtype
        def merged(params: Mapping[str, Any]) -> Any:
            states, rules = params[STATE], RulesOfStates()
            with rules_of_states(rules):
                value, grads = plain(_with_states(params, _map_states(with_max_gradients, states)), *args, **kwargs)
            loss, *aux = value if has_aux else (value,)
            observed = _observed(states, grads[STATE])
            others = gradients_or_nan(_without_state(grads), loss_or_nan(loss, observed))
            outcome = outcome_of(loss, _wide(others), observed)
            after = _kept_unless(outcome.finite, _next_states(rules, states, grads[STATE]), states)
            shown = {**others, STATE: after}
            return (outcome.loss, *aux) if has_aux else outcome.loss, _in_container(grads, shown)

        return merged(params)

    return differentiate


def _check_variables(params: Any) -> None:
    """Raise TypeError for what is not a model's variables."""
    # An nnx.Dict is a mapping, too.
    is_nnx = isinstance(params, nnx.Module)
    if is_nnx or not isinstance(params, Mapping):
        remedy = "take jax_te.value_and_grad for an NNX model" if is_nnx else "give what init returns, or state.params"
        raise TypeError(
            "jax_te.linen.value_and_grad takes the variables of a Linen model, a mapping of collections, got "
            f"{type(params).__name__}; {remedy}"
        )


def _with_states(collections: Mapping[str, Any], states: Any) -> Mapping[str, Any]:
    """Return collections with other states, in the same container."""
    return _in_container(collections, {**collections, STATE: states})


def _in_container(like: Mapping[str, Any], collections: dict[str, Any]) -> Mapping[str, Any]:
    """Return collections in the container of ``like``."""
    return freeze(collections) if isinstance(like, FrozenDict) else collections


def _without_state(collections: Mapping[str, Any]) -> dict[str, Any]:
    """Return collections without that of the states."""
    return {name: collections[name] for name in collections if name != STATE}


def _wide(grads: Any) -> list[Array]:
    """Return gradients in fp32, in which squares of half-precision ones do not overflow."""
    leaves = [grad for grad in jax.tree.leaves(grads) if jnp.issubdtype(grad.dtype, jnp.floating)]
    return [grad.astype(jnp.float32) for grad in leaves]


def _observed(states: Any, gradient: Any) -> list[Any]:
    """Return the gradients of our states of delayed scaling, in fp32."""
    found: list[Any] = []
    _map_states(lambda state, gradient: found.append(as_float32(dict(gradient))), states, gradient)
    return found


def _kept_unless(finite: Array, new: Any, old: Any) -> Any:
    """Return the states of the collection after a step: ``new`` if it counts, else ``old``."""

    def kept(new: Any, old: Any) -> Any:
        if new.dtype == fp32_max_grad:  # another package's, which JAX cannot select
            return jax.lax.convert_element_type(jnp.where(finite, as_float32(new), as_float32(old)), new.dtype)
        return jnp.where(finite, new, old)

    return jax.tree.map(kept, new, old)


def _is_state(node: Any) -> bool:
    """Return whether a node is the state of a linear layer or of a core of attention: scales and histories by role."""
    return isinstance(node, (dict, FrozenDict)) and bool(node) and all(map(is_amax_state, node.values()))


def _next_states(rules: RulesOfStates, old: Any, gradient: Any) -> Any:
    """Return the next values of the states of the collection."""

    def advanced(path: Any, old: Any, new: Any) -> Any:
        if _is_state(old):
            return write_back(old, new)
        names = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
        if names[-1] == USES:
            return old  # next values are merged here, not added
        rule = rules.of(names)
        if rule is not None:
            return rule.advance(old, new)
        return _next_foreign(old, new)  # a router's that was not called, or another package's

    after = jax.tree_util.tree_map_with_path(advanced, old, gradient, is_leaf=_is_state)
    rules.check_all_were_asked_for()
    return after


def _next_foreign(old: Any, gradient: Any) -> Any:
    """Return the next value of a variable of the collection that no layer here has read: its gradient, or ``old`` if
    nothing gave it one."""
    if gradient.dtype == jax.dtypes.float0:  # of integers, through which no next value comes
        return old
    dtype = gradient.dtype
    if dtype == fp32_max_grad:  # which JAX cannot compare; its zero is that of maxima, -inf
        old, gradient = as_float32(old), as_float32(gradient)
    was_given = jnp.any((gradient != 0.0) & (gradient != -jnp.inf))
    return jax.lax.convert_element_type(jnp.where(was_given, gradient, old), dtype)


def _map_states(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map ``fn`` over our states. Other variables of the collection, e.g. Flax's own FP8 state, are the last tree's."""
    return jax.tree.map(lambda *nodes: fn(*nodes) if _is_state(nodes[0]) else nodes[-1], tree, *rest, is_leaf=_is_state)


def _without_states(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the collection that are not our states."""
    kept = {
        name: _without_states(node) if isinstance(node, dict) else node
        for name, node in tree.items()
        if not _is_state(node)
    }
    kept = {name: node for name, node in kept.items() if not isinstance(node, dict) or node}
    return {} if kept.keys() == {USES} else kept


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of both trees; for names in both, those of ``old``."""
    both = {n: _merged(new[n], old[n]) for n in new.keys() & old.keys() if isinstance(new[n], dict)}
    return {**new, **old, **both}
