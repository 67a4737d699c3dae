"""State outside of gradients, of delayed scaling and of routers: how it merges, and what it is in the next step.

States of delayed scaling are made here, too; those that count by the layers that own them, the router and the further
heads of `models/multi_token.py`.

A call's information about a state leaves backward as the state's gradient. It therefore must not reach code that treats
it as a gradient (clipping, norms, the optimizer). There are two kinds:

- A scale or an amax history of delayed scaling: its gradient is its next value. Values of several uses, microbatches,
  loops and stages merge by maximum, and the result is written back unchanged.
- A state with a rule of `Counting` (``counting.py``): its gradient is a count. Counts of all uses of a step add up, and
  once a step the rule computes the next value from the old one and the sum.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.linen.fp8_ops import fp32_max_grad

from jax_te._validation import brief, check_axes, check_leaves, checked
from jax_te.errors import QuantizerStateError
from jax_te.quantize.attention import AttentionState, attention_precision_of
from jax_te.quantize.counting import Counting, counting_of
from jax_te.quantize.precision import ROLES, GemmState
from jax_te.quantize.scaling import AmaxState, max_or_nan
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.sharding import batch_ranks
from jax_te.typing import PyTree

_TOGETHER = 32
"""Number of states written at once on a GPU: XLA does not fuse operations on many more arrays."""


USES = "uses"
"""Name of a number beside a layer's states in Linen's collection, see `jax_te.linen.state_gradients`."""


@nnx.register_variable_name("_overwrite_with_gradient")
class QuantizerState(nnx.Variable):
    """NNX Variable of one array of state outside of gradients: an array of a `GemmState`, or a counting state.

    A layer holds a `GemmState` of these: a scale and an amax history for each operand, whose gradients are their next
    values. A counting state has its rule in its metadata, ``QuantizerState(value, counting=rule)``, see `Counting`.
    Linen shows it as the collection ``_overwrite_with_gradient``.
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
        entries[role] = _fresh(lead, recipe.amax_history_len)
    return GemmState(**entries)  # type: ignore[typeddict-item]


@checked
def init_attention_state(recipe: Recipe | None) -> AttentionState | None:
    """Return fresh state for one attention core under a recipe with ``fp8_dpa``: scales 1, histories 0.

    The result is None if attention is not quantized, or all of its scales are current.

    Raises:
        ValueError: for ``tp_only_amax_red`` on a mesh that splits the batch.

    >>> from jax_te.recipe import Float8CurrentScaling
    >>> list(init_attention_state(Float8CurrentScaling(fp8_dpa=True)))
    ['dp', 'dq', 'dk', 'dv']
    """
    precision = attention_precision_of(recipe)
    if precision is None or not precision.roles:
        return None
    if precision.by_parts and batch_ranks() > 1:
        raise ValueError(
            f"tp_only_amax_red=True asks for a scale of each of the mesh's {batch_ranks()} parts of the batch, and FP8 "
            "attention has one for the whole; use DelayedScaling(tp_only_amax_red=False), or fp8_dpa=False"
        )
    return {role: _fresh((), precision.history_length) for role in precision.roles}


def _fresh(lead: tuple[int, ...], length: int) -> AmaxState:
    return {"scale": jnp.ones(lead, jnp.float32), "amax_history": jnp.zeros((*lead, length), jnp.float32)}


def quantizer_variables(state: PyTree, group_axis: str | None = None, *, stack: int = 0) -> PyTree:
    """Return a `GemmState` in the Variables that a layer holds; None for None.

    Args:
        state: the state.
        group_axis: logical axis of the first axis ``[e]`` of a state of several groups. None: it has no name.
        stack: number of axes in front, of a stack of layers.
    """

    # One array in each: Flax's tools and Orbax expect the value of a Variable to be an array.
    def variable(array: jax.Array) -> QuantizerState:
        if group_axis is None:
            return QuantizerState(array)
        return QuantizerState(array, logical_axes=(group_axis, *(None,) * (array.ndim - stack - 1)))

    return jax.tree.map(variable, state)


def with_max_gradients(quantizers: PyTree) -> PyTree:
    """Return states whose gradients JAX merges by maximum if a state is used more than once, instead of adding them.

    The arrays get flax's dtype ``fp32_max_grad``: differentiate with ``allow_int=True``, and make the next states by
    `write_back`. A derivative of fp32 states raises: the next value of a layer that is called twice in one forward pass
    would be the sum of two next values.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> with_max_gradients(state)["x"]["scale"].dtype
    fp8_meta32
    """
    check_leaves("quantizers", quantizers)
    for leaf in jax.tree.leaves(quantizers):
        if leaf.dtype not in (jnp.float32, fp32_max_grad):
            raise TypeError(f"quantizers must be states in float32, got {leaf.dtype}")
    return map_amax_states(lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), quantizers)


def check_gradients_merge(state: PyTree, differentiated: PyTree) -> None:
    """Raise QuantizerStateError if a derivative would add the gradients of a state, which are next values.

    Args:
        state: state of one call, as the caller gave it.
        differentiated: whether each of its arrays is differentiated.
    """
    arrays = zip(jax.tree.leaves(state), jax.tree.leaves(differentiated), strict=True)
    if any(wanted and array.dtype == jnp.float32 for array, wanted in arrays):
        raise QuantizerStateError(_WOULD_BE_ADDED)


_WOULD_BE_ADDED = (
    "a derivative takes the state of delayed scaling in fp32, whose gradient is its next value: JAX would add those of "
    "two calls, and an optimizer would train it. For an NNX model take jax_te.value_and_grad, which writes the next "
    "state to the model, and an optimizer for nnx.Param:\n"
    "    from jax_te import value_and_grad\n"
    "    loss, grads = value_and_grad(loss_fn)(model)\n"
    "A function of your own differentiates jax_te.quantize.with_max_gradients(state), with allow_int=True, and makes "
    "the next state by jax_te.quantize.write_back(state, gradient)"
)


def map_amax_states(fn: Callable[..., Any], states: PyTree) -> PyTree:
    """Return states with ``fn`` applied to each array of delayed scaling; counting states stay."""

    def mapped(node: Any) -> Any:
        return jax.tree.map(fn, node) if counting_of(node) is None else node

    return jax.tree.map(mapped, states, is_leaf=lambda node: counting_of(node) is not None)


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


# A custom derivative, because JAX's transpose of the conversion fails on arrays of this dtype.
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
    return map_amax_states(_with_max_gradients_inside, quantizers)


@jax.custom_vjp
def _with_max_gradients_inside(leaf: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(leaf, fp32_max_grad)


_with_max_gradients_inside.defvjp(
    lambda leaf: (_with_max_gradients_inside(leaf), None),
    lambda _, gradient: (jax.lax.convert_element_type(gradient, jnp.float32),),
)


def merge_quantizers(stacked: PyTree) -> PyTree:
    """Return one gradient of states for several that started from the same states.

    It is the maximum over the leading axis, and the sum for counting states. A nan amax stays nan, so that the step
    sees it, as for a single microbatch.

    Args:
        stacked: gradients of states of microbatches, loop iterations or pipeline stages, stacked: leaves ``[m, ...]``;
            Variables if some count. Linen's collections have none: there `jax_te.linen.value_and_grad` merges.

    Raises:
        TypeError: for a bare array that is no scale or amax history: it may be a count, of which there is no maximum.
    """
    check_leaves("stacked", stacked)
    for path, node in jax.tree_util.tree_leaves_with_path(
        stacked, is_leaf=lambda node: is_amax_state(node) or isinstance(node, nnx.Variable)
    ):
        if not (is_amax_state(node) or isinstance(node, nnx.Variable) or _is_number_of_uses(path)):
            raise TypeError(
                "stacked must be states of quantizers, dicts of scale and amax_history, or Variables, whose metadata "
                f"say what counts, got {brief(node)}; for a Linen model with experts let one loss in "
                "jax_te.linen.value_and_grad run all microbatches"
            )
    for leaf in jax.tree.leaves(stacked):
        check_axes("a leaf of stacked", leaf)

    def merged(node: Any) -> Any:
        # A maximum is right for all leaves of delayed scaling: the scales are equal, because all were computed from the
        # common state, and the histories differ only in slot 0, the newest amax.
        combined = max_or_nan if counting_of(node) is None else jnp.sum
        return jax.tree.map(lambda leaf: combined(leaf, axis=0), node)

    return jax.tree.map(merged, stacked, is_leaf=lambda node: counting_of(node) is not None)


@checked
def write_back(old: PyTree, gradient: PyTree, *, keep_old: jax.Array | None = None) -> PyTree:
    """Return the states of the next step.

    They are the gradients of ``old``, or ``old`` for layers that did not run, and for operands whose new amax is not
    finite; for counting states, the results of their rules.

    Args:
        old: states of this step; Variables if some count.
        gradient: gradients of the states, in fp32 or as `with_max_gradients` leaves them.
        keep_old: bool ``[]``, true for a skipped step, which keeps ``old``.

    >>> from jax_te.ops import dense
    >>> recipe = DelayedScaling(amax_history_len=2)
    >>> state, x = init_gemm_state(recipe), jnp.full((16, 16), 3.0)
    >>> def loss(state):
    ...     return jnp.sum(dense(x, x, recipe=recipe, state=state))
    >>> state = write_back(state, jax.grad(loss, allow_int=True)(with_max_gradients(state)))
    >>> state["x"]["amax_history"].tolist()
    [3.0, 0.0]
    """
    check_leaves("old", old)
    check_leaves("gradient", gradient)
    gradient = jax.tree.map(lambda leaf: as_float32(leaf) if leaf.dtype == fp32_max_grad else leaf, gradient)
    if keep_old is not None and keep_old.dtype != bool:
        raise TypeError(f"keep_old must be a bool array, got {keep_old.dtype}")
    entries, treedef = _entries(old, gradient)
    amax_states = iter(_next_amax_states([entry for entry in entries if entry.rule is None], keep_old))
    new = [next(amax_states) if entry.rule is None else _next_count(entry, keep_old) for entry in entries]
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(jax.tree.unflatten(treedef, new)))


def observed_finite_amaxes(gradient: PyTree) -> jax.Array | None:
    """Return whether all amaxes that a step has observed are finite, bool ``[]``; None if no state of it has amaxes.

    Args:
        gradient: gradients of states, in fp32. Those of layers that did not run, 0 or -inf, have observed nothing.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> state["x"]["amax_history"] = jnp.array([jnp.inf, 1.0])
    >>> observed_finite_amaxes(state)
    Array(False, dtype=bool)
    """
    states = [node for node in jax.tree.leaves(nnx.as_pure(gradient), is_leaf=is_amax_state) if is_amax_state(node)]
    newest = [state["amax_history"][..., 0] for state in states]
    alike = collections.defaultdict(list)
    for amax in newest:
        alike[jax.typeof(amax)].append(amax)  # on an Explicit mesh a type has the sharding, too
    parts = [group[i : i + _TOGETHER] for group in alike.values() for i in range(0, len(group), _TOGETHER)]
    if not parts:
        return None
    # By a comparison that is false for nan, too; a maximum may lose it.
    return jnp.all(jnp.stack([jnp.all(jnp.stack(part) < jnp.inf) for part in parts]))


class _Entry(NamedTuple):
    """A state of this step, an `AmaxState` or an array that counts, its gradient, and its rule if it counts."""

    old: PyTree
    gradient: PyTree
    rule: Counting | None


def _entries(old: PyTree, gradient: PyTree) -> tuple[list[_Entry], Any]:
    """Return all states with their gradients and rules, and the structure of the tree that they make.

    Raises:
        TypeError: for an array that is of no `AmaxState` and has no rule.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(nnx.as_pure(old), is_leaf=is_amax_state)
    gradients = treedef.flatten_up_to(nnx.as_pure(gradient))
    rules = iter(_rules(old))
    entries = []
    for (path, state), its_gradient in zip(with_paths, gradients, strict=True):
        rule, *_ = [next(rules) for _ in jax.tree.leaves(state)]  # one for each array, and all of a state are alike
        if rule is None and _is_number_of_uses(path):
            rule = _OneUse()
        if rule is None and not is_amax_state(state):
            raise TypeError(
                "old must be states of quantizers, dicts of scale and amax_history, or Variables that count, "
                f"got {brief(old)}"
            )
        if rule is None:  # of a FrozenDict, too
            state, its_gradient = dict(state), dict(its_gradient)
        entries.append(_Entry(state, its_gradient, rule))
    return entries, treedef


class _OneUse(Counting):
    """Rule of the number of uses, where next states of several uses are merged and not added."""

    def advance(self, old: jax.Array, total: jax.Array) -> jax.Array:
        return old


def _is_number_of_uses(path: tuple[Any, ...]) -> bool:
    """Return whether the array at a path is the number of uses beside the states of a Linen layer."""
    return bool(path) and getattr(path[-1], "key", None) == USES


def _rules(states: PyTree) -> list[Counting | None]:
    """Return the rule of each array, None for those of delayed scaling."""
    nodes = jax.tree.leaves(states, is_leaf=lambda node: counting_of(node) is not None)
    return [counting_of(node) for node in nodes]


def _next_count(entry: _Entry, keep_old: jax.Array | None) -> Any:
    """Return the next value of a state that counts."""
    assert entry.rule is not None
    value = entry.rule.advance(entry.old, entry.gradient)
    return value if keep_old is None else jnp.where(keep_old, entry.old, value)


def _next_amax_states(entries: list[_Entry], keep_old: jax.Array | None) -> list[AmaxState]:
    """Return the next states of delayed scaling, in order. On a GPU several of one type are computed at once."""
    places = collections.defaultdict(list)
    for place, entry in enumerate(entries):
        # On an Explicit mesh a type has the sharding, too.
        types = tuple(map(jax.typeof, jax.tree.leaves((entry.old, entry.gradient))))
        places[types].append(place)
    found: dict[int, AmaxState] = {}
    for alike in places.values():
        old, new = [entries[place].old for place in alike], [entries[place].gradient for place in alike]
        next_states = jax.lax.platform_dependent(
            old,
            new,
            keep_old,
            cpu=_carry_on_one_by_one,
            default=_carry_on_in_stacks,
        )
        found.update(zip(alike, next_states, strict=True))
    return [found[place] for place in range(len(entries))]


def _carry_on_one_by_one(old: list[AmaxState], new: list[AmaxState], keep_old: jax.Array | None) -> list[AmaxState]:
    """Return the next states of states of one type, for CPUs.

    XLA compiles one kernel for all scales and one for all histories. It would compile one for each slice of a stack.
    """
    return [_carry_on(*states, keep_old) for states in zip(old, new, strict=True)]


def _carry_on_in_stacks(old: list[AmaxState], new: list[AmaxState], keep_old: jax.Array | None) -> list[AmaxState]:
    """Return the next states of states of one type, for GPUs: `_TOGETHER` of them are computed at once."""
    parts = [slice(first, first + _TOGETHER) for first in range(0, len(old), _TOGETHER)]
    return [state for part in parts for state in _carry_on_stack(old[part], new[part], keep_old)]


# Jitted, so that JAX traces it once for all stacks of one size. XLA inlines the calls.
@jax.jit
def _carry_on_stack(
    old_states: list[AmaxState], gradients: list[AmaxState], keep_old: jax.Array | None
) -> list[AmaxState]:
    """Return the next states of states of one type, computed on stacks of them."""
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    # With the barrier a few kernels read all states, and a few others write them. Without it XLA for GPUs has three
    # for each, two of them copies: a history that moves by a slot cannot be written over the one that is read.
    old, new = jax.lax.optimization_barrier((stack(*old_states), stack(*gradients)))
    states = _carry_on(old, new, keep_old)
    return [jax.tree.map(lambda stacked, index=index: stacked[index], states) for index in range(len(old_states))]


# Jitted, so that JAX traces it once for all states of one type. XLA inlines the calls.
@jax.jit
def _carry_on(old: AmaxState, new: AmaxState, keep_old: jax.Array | None) -> AmaxState:
    """Return the next state of a state, or of a stack of them."""
    # A layer that did not run has the gradient 0, or -inf in `with_max_gradients`'s dtype. Scales are positive.
    # An amax that is not finite would keep the scale as it is until it drops out of the history.
    keep = ~(new["scale"] > 0.0) | ~(new["amax_history"][..., 0] < jnp.inf)
    if keep_old is not None:
        keep = jnp.logical_or(keep, keep_old)
    return jax.tree.map(lambda before, after: jnp.where(_as_rows(keep, before), before, after), old, new)


def _as_rows(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return a mask of states in the rank of their scales, or of their histories, which have one axis more."""
    return mask if leaf.ndim == mask.ndim else mask[..., None]


def is_amax_state(node: Any) -> bool:
    """Return whether a node of a tree is the state of an operand under delayed scaling: its scale and amax history.

    It may be a dict or Flax's ``FrozenDict``.
    """
    return isinstance(node, (dict, FrozenDict)) and set(node) == {"scale", "amax_history"}
