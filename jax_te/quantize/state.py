"""Delayed-scaling state, and its one owner: nothing outside this file creates, splits, merges or writes it.

The gradient of a state is its next value. It therefore must be kept away from everything that treats gradients as
gradients (sums over microbatches, clipping, norms, the optimizer) and be written back as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad

from jax_te.quantize.gemm_quantizers import ROLES, GemmState
from jax_te.quantize.scaling import AmaxState
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.sharding.internal import batch_ranks
from jax_te.typing import PyTree


@nnx.register_variable_name("_overwrite_with_gradient")
class QuantizerState(nnx.Variable):
    """NNX Variable that holds one `GemmState`: what delayed scaling remembers of a linear layer.

    Its gradient is its next value. Linen shows it as the collection ``_overwrite_with_gradient``.
    """


def init_gemm_state(recipe: Recipe | None) -> GemmState | None:
    """Fresh state for one linear layer: scales 1, histories 0. None if the recipe keeps no state.

    With ``tp_only_amax_red`` its shapes depend on the mesh in use, and it goes with meshes that split the batch alike.

    >>> from jax_te.recipe import DelayedScaling
    >>> init_gemm_state(DelayedScaling(amax_history_len=4))["x"]["amax_history"].shape
    (4,)
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    parts = (batch_ranks(),) if recipe.tp_only_amax_red and batch_ranks() > 1 else ()
    entries = {}
    for role in ROLES:
        lead = () if role == "kernel" else parts
        entries[role] = {
            "scale": jnp.ones(lead, jnp.float32),
            "amax_history": jnp.zeros((*lead, recipe.amax_history_len), jnp.float32),
        }
    return GemmState(**entries)  # type: ignore[typeddict-item]


def quantizer_variable(recipe: Recipe | None) -> QuantizerState | None:
    """`init_gemm_state` as the Variable a layer holds, or None."""
    state = init_gemm_state(recipe)
    return None if state is None else QuantizerState(state)


def split_model(model: nnx.Module) -> tuple[Any, nnx.State, nnx.State, nnx.State]:
    """``(graphdef, parameters, quantizer states, everything else)`` of a model; undo with ``nnx.merge``.

    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> graphdef, params, quantizers, rest = split_model(model)
    >>> len(jax.tree.leaves(params)), len(jax.tree.leaves(quantizers))
    (2, 0)
    """
    graphdef, params, quantizers, rest = nnx.split(model, nnx.Param, QuantizerState, ...)
    return graphdef, params, quantizers, rest


def max_merging(quantizers: PyTree) -> PyTree:
    """States whose gradients JAX merges by maximum where a state is used more than once, instead of adding them up.

    The arrays get a dtype of their own for that, ``flax``'s ``fp32_max_grad``; differentiate with ``allow_int=True``,
    and give the gradients to `plain_states`. Under plain fp32 states, a layer that is called twice in one forward pass
    gets the sum of two next values as its next value.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> max_merging(state)["x"]["scale"].dtype
    fp8_meta32
    """
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), quantizers)


def plain_states(quantizers: PyTree) -> PyTree:
    """The inverse of `max_merging`; fp32 arrays stay as they are.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> plain_states(max_merging(state))["x"]["scale"].dtype
    dtype('float32')
    """
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.float32), quantizers)


def plain_inside(quantizers: PyTree) -> PyTree:
    """`plain_states` inside of a function that is differentiated, where the gradients go back to what the states were.

    For what JAX cannot do with arrays of `max_merging`'s dtype, like stacking them. What is used more than once behind
    it is added up, so give each use its own.

    >>> state = max_merging(init_gemm_state(DelayedScaling(amax_history_len=2)))
    >>> jax.grad(lambda state: plain_inside(state)["x"]["scale"], allow_int=True)(state)["x"]["scale"].dtype
    fp8_meta32
    """
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.float32 else _plain_inside(leaf), quantizers)


@jax.custom_vjp
def _plain_inside(leaf: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(leaf, jnp.float32)


# JAX's own transpose of the conversion fails on arrays of this dtype.
_plain_inside.defvjp(
    lambda leaf: (_plain_inside(leaf), None),
    lambda _, gradient: (jax.lax.convert_element_type(gradient, fp32_max_grad),),
)


def merge_quantizers(stacked: PyTree) -> PyTree:
    """One next state out of several that started from the same state: elementwise maximum over the leading axis.

    Args:
        stacked: next states of microbatches, loop iterations or pipeline stages, stacked: leaves ``[m, ...]``.

    The scales of all are equal (they were taken from the common state) and of the histories only slot 0, the newest
    amax, differs.
    A nan amax stays nan, so the next scale is kept, as it is for a single microbatch.
    """
    return jax.tree.map(_largest, stacked)


def _largest(leaf: jax.Array) -> jax.Array:
    """Maximum over the leading axis. A nan is looked for: XLA on CPU loses it from maxima over large arrays."""
    return jnp.where(jnp.any(jnp.isnan(leaf), axis=0), jnp.nan, jnp.max(leaf, axis=0))


def write_back(old: PyTree, gradient: PyTree, *, keep_old: jax.Array | None = None) -> PyTree:
    """The states to carry on with: their gradients, or the old ones where ``keep_old`` (a skipped step) is true.

    A layer that did not run has the gradient zero, or -inf where gradients merge by maximum. A scale is always
    positive, so that such a state is recognized and kept, too.
    """

    def carry_on(before: AmaxState, after: AmaxState) -> AmaxState:
        keep = ~(after["scale"] > 0.0)
        if keep_old is not None:
            keep = jnp.logical_or(keep, keep_old)
        return {
            "scale": jnp.where(keep, before["scale"], after["scale"]),
            "amax_history": jnp.where(keep[..., None], before["amax_history"], after["amax_history"]),
        }

    return jax.tree.map(carry_on, old, gradient, is_leaf=_is_amax_state)


def _is_amax_state(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"scale", "amax_history"}


def prepare_quantization(model: nnx.Module, recipe: Recipe | None) -> nnx.Module:
    """Give every quantizable layer of ``model`` fresh state for ``recipe``, or take its state away.

    Use it to quantize a model that was built or loaded without a recipe, and to change the recipe of a running one.
    Parameters are untouched.
    State of the same recipe fields is replaced too: the histories start empty.

    Args:
        model: changed in place, and returned.
        recipe: None and recipes without state remove the state.

    Raises:
        ValueError: if nothing in ``model`` can be quantized.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import DelayedScaling
    >>> layer = prepare_quantization(Linear(16, 16, rngs=nnx.Rngs(0)), DelayedScaling())
    >>> layer.quantizers["x"]["scale"].shape
    ()
    """
    found = False
    for _, module in nnx.iter_modules(model):
        own = getattr(module, "module_recipe", None)
        ambient = None if getattr(module, "high_precision", False) else recipe
        effective = ambient if own is None else own.resolve(ambient, training=True)
        for kernel, name in getattr(module, "kernels", {}).items():
            found = True
            setattr(module, name, nnx.data(quantizer_variable(effective)))
            setattr(module, f"{kernel}_cache", nnx.data(None))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer that a recipe could quantize; jax_te.layers has: Linear, "
            "LayerNormLinear, LayerNormMLP and what is built from them"
        )
    return model
