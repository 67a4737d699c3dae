"""Delayed-scaling state: no other file creates, merges or writes it.

The gradient of a state is its next value. It therefore must not reach anything that treats gradients as gradients
(sums over microbatches, clipping, norms, the optimizer), and it is written back unchanged.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad

from jax_te._validation import brief, check_axes, check_leaves, checked
from jax_te.quantize.precision import ROLES, GemmState
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.sharding import batch_ranks
from jax_te.typing import PyTree

_TOGETHER = 32
"""States that are written at once: XLA for GPUs does not fuse what reads and writes many more arrays."""

# A user context takes part in the jit cache key: what was traced with frozen scales is traced again without.
scales_are_frozen = jax.make_user_context(False)


@contextlib.contextmanager
def frozen_scales() -> Iterator[None]:
    """Yield with the state of delayed scaling held fast in every call that is traced or made inside.

    The scales stay those of the histories that the state has: backward takes no amax, the state's gradient is the state
    itself, and the state may be left out of what is differentiated. A call outside that leaves it out raises
    `jax_te.errors.QuantizerStateError`, since its scales would never fit what it quantizes.

    >>> from jax_te.ops import dense
    >>> recipe = DelayedScaling(amax_history_len=1)
    >>> state, x = init_gemm_state(recipe), jnp.ones((16, 16))
    >>> with frozen_scales():
    ...     dx = jax.grad(lambda x: jnp.sum(dense(x, x, recipe=recipe, state=state)))(x)
    """
    with scales_are_frozen(True):
        yield


@nnx.register_variable_name("_overwrite_with_gradient")
class QuantizerState(nnx.Variable):
    """NNX Variable that holds one array of a `GemmState`: a scale or an amax history of one operand.

    A layer holds a `GemmState` of these. Its gradient is its next value. Linen shows it as the collection
    ``_overwrite_with_gradient``.
    """


@checked
def init_gemm_state(recipe: Recipe | None, *, groups: int | None = None) -> GemmState | None:
    """Return fresh state for one linear layer: scales 1, histories 0. None if the recipe has no state.

    With ``tp_only_amax_red`` its shapes depend on the mesh in use: the state fits meshes that shard the batch alike.

    Args:
        recipe: the recipe of the layer.
        groups: number ``e`` of layers that `jax_te.ops.grouped_dense` runs as one, whose arrays are ``[e]`` and
            ``[e, n]``. None: one layer.

    Raises:
        ValueError: for ``groups`` under ``tp_only_amax_red``, on a mesh that splits the batch.

    >>> from jax_te.recipe import DelayedScaling
    >>> init_gemm_state(DelayedScaling(amax_history_len=4))["x"]["amax_history"].shape
    (4,)
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    parts = (batch_ranks(),) if recipe.tp_only_amax_red and batch_ranks() > 1 else ()
    each = () if groups is None else (groups,)
    if each and parts:
        raise ValueError(
            f"experts have a scale for each of their {groups} kernels' inputs, and tp_only_amax_red=True one for each "
            f"of {parts[0]} parts of the batch, which is that of one layer; use DelayedScaling(tp_only_amax_red=False)"
        )
    entries = {}
    for role in ROLES:
        # A kernel has no batch axis, so it has one scale on every mesh.
        lead = each or (() if role == "kernel" else parts)
        entries[role] = {
            "scale": jnp.ones(lead, jnp.float32),
            "amax_history": jnp.zeros((*lead, recipe.amax_history_len), jnp.float32),
        }
    return GemmState(**entries)  # type: ignore[typeddict-item]


def quantizer_variables(state: PyTree) -> PyTree:
    """Return a `GemmState` in the Variables that a layer holds; None for None."""
    # One array in each: Flax's tools and Orbax take the value of a Variable for an array.
    return jax.tree.map(QuantizerState, state)


def with_max_gradients(quantizers: PyTree) -> PyTree:
    """Return states whose gradients JAX merges by maximum if a state is used more than once, instead of adding them.

    The arrays get flax's dtype ``fp32_max_grad``: differentiate with ``allow_int=True``, and convert the gradients by
    `as_float32`. With fp32 states, the next value of a layer that is called twice in one forward pass would be the sum
    of two next values.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> with_max_gradients(state)["x"]["scale"].dtype
    fp8_meta32
    """
    check_leaves("quantizers", quantizers)
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), quantizers)


def as_float32(quantizers: PyTree) -> PyTree:
    """Return states, or their gradients, in fp32: the inverse of `with_max_gradients`. fp32 arrays do not change.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> as_float32(with_max_gradients(state))["x"]["scale"].dtype
    dtype('float32')
    """
    check_leaves("quantizers", quantizers)
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.float32), quantizers)


def as_float32_inside(quantizers: PyTree) -> PyTree:
    """Return states in fp32 inside a function that is differentiated; gradients come back in the states' own dtype.

    Use it for operations that JAX lacks for the dtype of `with_max_gradients`, such as stacking. Gradients of several
    uses of one result are added, not merged by maximum, so convert once for each use.

    >>> state = with_max_gradients(init_gemm_state(DelayedScaling(amax_history_len=2)))
    >>> jax.grad(lambda state: as_float32_inside(state)["x"]["scale"], allow_int=True)(state)["x"]["scale"].dtype
    fp8_meta32
    """
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.float32 else _as_float32_inside(leaf), quantizers)


@jax.custom_vjp
def _as_float32_inside(leaf: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(leaf, jnp.float32)


# A derivative of our own, because JAX's transpose of the conversion fails on arrays of this dtype.
_as_float32_inside.defvjp(
    lambda leaf: (_as_float32_inside(leaf), None),
    lambda _, gradient: (jax.lax.convert_element_type(gradient, fp32_max_grad),),
)


def with_max_gradients_inside(quantizers: PyTree) -> PyTree:
    """Return `with_max_gradients` of states inside a function that is differentiated: the inverse of
    `as_float32_inside`.

    >>> state = {"scale": jnp.float32(2.0)}
    >>> jax.grad(lambda state: as_float32_inside(with_max_gradients_inside(state))["scale"])(state)["scale"].dtype
    dtype('float32')
    """
    return jax.tree.map(_with_max_gradients_inside, quantizers)


@jax.custom_vjp
def _with_max_gradients_inside(leaf: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(leaf, fp32_max_grad)


_with_max_gradients_inside.defvjp(
    lambda leaf: (_with_max_gradients_inside(leaf), None),
    lambda _, gradient: (jax.lax.convert_element_type(gradient, jnp.float32),),
)


def merge_quantizers(stacked: PyTree) -> PyTree:
    """Return one next state of several that started from the same state: their maximum over the leading axis.

    A nan amax stays nan, so that the next scale is the old one, as for a single microbatch.

    Args:
        stacked: next states of microbatches, loop iterations or pipeline stages, stacked: leaves ``[m, ...]``.
    """
    check_leaves("stacked", stacked)
    for leaf in jax.tree.leaves(stacked):
        check_axes("a leaf of stacked", leaf)
    # A maximum is right for all leaves: the scales are equal, because all were taken from the common state, and the
    # histories differ in slot 0 alone, the newest amax.
    return jax.tree.map(_largest, stacked)


def _largest(leaf: jax.Array) -> jax.Array:
    """Maximum over the leading axis."""
    # nan is tested for, because XLA on CPU loses it from maxima over large arrays.
    return jnp.where(jnp.any(jnp.isnan(leaf), axis=0), jnp.nan, jnp.max(leaf, axis=0))


@checked
def write_back(old: PyTree, gradient: PyTree, *, keep_old: jax.Array | None = None) -> PyTree:
    """Return the states of the next step: the gradients of ``old``, or ``old`` for layers that did not run.

    Args:
        old: states of this step.
        gradient: their gradients, in fp32.
        keep_old: bool ``[]``, true for a skipped step, which keeps ``old``.
    """
    check_leaves("old", old)
    check_leaves("gradient", gradient)
    if keep_old is not None and keep_old.dtype != bool:
        raise TypeError(f"keep_old must be a bool array, got {keep_old.dtype}")
    before, treedef = jax.tree.flatten(nnx.as_pure(old), is_leaf=_is_amax_state)
    if not all(map(_is_amax_state, before)):
        raise TypeError(f"old must be states of quantizers, dicts of scale and amax_history, got {brief(old)}")
    after = treedef.flatten_up_to(nnx.as_pure(gradient))
    alike = collections.defaultdict(list)
    for index, states in enumerate(zip(before, after, strict=True)):
        alike[tuple(map(jax.typeof, jax.tree.leaves(states)))].append(index)  # on an Explicit mesh with the sharding
    new: list[Any] = [None] * len(before)
    parts = [group[k : k + _TOGETHER] for group in alike.values() for k in range(0, len(group), _TOGETHER)]
    for part in parts:
        states = _carry_on([before[index] for index in part], [after[index] for index in part], keep_old)
        for index, state in zip(part, states, strict=True):
            new[index] = state
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(jax.tree.unflatten(treedef, new)))


def _carry_on(before: list[PyTree], after: list[PyTree], keep_old: jax.Array | None) -> list[PyTree]:
    """Return the next states of some whose arrays have the same types."""
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    # With the barrier a few kernels read all states, and a few others write them. Without it XLA for GPUs has three
    # for each, two of them copies: a history that moves by a slot cannot be written over the one that is read.
    old, new = jax.lax.optimization_barrier((stack(*before), stack(*after)))
    # A layer that did not run has the gradient 0, or -inf in `with_max_gradients`'s dtype. Scales are positive.
    keep = ~(new["scale"] > 0.0)
    if keep_old is not None:
        keep = jnp.logical_or(keep, keep_old)
    states = {
        "scale": jnp.where(keep, old["scale"], new["scale"]),
        "amax_history": jnp.where(keep[..., None], old["amax_history"], new["amax_history"]),
    }
    return [jax.tree.map(lambda stacked, index=index: stacked[index], states) for index in range(len(before))]


def _is_amax_state(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"scale", "amax_history"}
