"""State outside of gradients, of delayed scaling and of routers: no other file creates, merges or writes it.

A call's information about a state leaves backward as the state's gradient. It therefore must not reach code that treats
it as a gradient (clipping, norms, the optimizer). There are two kinds:

- A scale or an amax history of delayed scaling: its gradient is its next value. Values of several uses, microbatches,
  loops and stages merge by maximum, and the result is written back unchanged.
- A state with a rule of `Counting`: its gradient is a count. Counts of all uses of a step add up, and once a step the
  rule computes the next value from the old one and the sum.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad
from jax.custom_derivatives import SymbolicZero

from jax_te._validation import brief, check_axes, check_leaves, checked
from jax_te.errors import QuantizerStateError
from jax_te.quantize.attention import AttentionState, attention_precision_of
from jax_te.quantize.precision import ROLES, GemmState
from jax_te.quantize.scaling import AmaxState
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.sharding import batch_ranks
from jax_te.typing import PyTree

_TOGETHER = 32
"""Number of states written at once: XLA for GPUs does not fuse operations on many more arrays."""

# A user context is part of the jit cache key: functions traced with frozen scales are traced again without them.
scales_are_frozen = jax.make_user_context(False)

counts_are_next_values = jax.make_user_context(False)
"""Whether the gradient of a counting state is its next value, like a scale's, because nothing merges counts: in Linen,
whose collections have no rules. Then a state may be used once in a step."""


@contextlib.contextmanager
def frozen_scales() -> Iterator[None]:
    """Yield with the state of delayed scaling frozen in every call that is traced or made inside.

    The scales stay those of the histories that the state has: backward takes no amax, the state's gradient is the state
    itself, and the state may be left out of what is differentiated. A call outside of the context that leaves it out
    raises `jax_te.errors.QuantizerStateError`, since its scales would never fit what it quantizes.

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
    """NNX Variable of one array of state outside of gradients: an array of a `GemmState`, or a counting state.

    A layer holds a `GemmState` of these: a scale and an amax history for each operand, whose gradients are their next
    values. A counting state has its rule in its metadata, ``QuantizerState(value, counting=rule)``, see `Counting`.
    Linen shows it as the collection ``_overwrite_with_gradient``.
    """


@dataclass(frozen=True)
class Counting:
    """Base of the rules of counting states. A rule is static, and compared by its fields.

    Class attributes:
        needed: a derivative of a layer in training that leaves the state out raises, since it would never change.
        within_step: later microbatches of a step read what the earlier ones counted, see `so_far`.
        persistent: a state dict holds the state; a checkpoint of a train state holds all.

    >>> class Total(Counting):
    ...     def advance(self, old, total):
    ...         return old + total
    >>> state = QuantizerState(jnp.zeros(2), counting=Total())
    >>> write_back({"a": state}, {"a": state.replace(jnp.ones(2))})["a"].get_value().tolist()
    [1.0, 1.0]
    """

    needed: ClassVar[bool] = True
    within_step: ClassVar[bool] = False
    persistent: ClassVar[bool] = True

    def advance(self, old: jax.Array, total: jax.Array) -> jax.Array:
        """Return the state of the next step; ``total`` is the sum of the step's counts, 0 if the layer did not run."""
        raise NotImplementedError

    def so_far(self, old: jax.Array, total: jax.Array) -> jax.Array:
        """Return the state that the step's next microbatch reads; ``total`` is the sum of the earlier ones' counts."""
        return old


def counting_of(variable: Any) -> Counting | None:
    """Return the rule of a counting state, None for any other Variable or array."""
    return variable.get_metadata().get("counting") if isinstance(variable, nnx.Variable) else None


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

    The arrays get flax's dtype ``fp32_max_grad``: differentiate with ``allow_int=True``, and convert the gradients by
    `as_float32`. With fp32 states, the next value of a layer that is called twice in one forward pass would be the sum
    of two next values.

    >>> state = init_gemm_state(DelayedScaling(amax_history_len=2))
    >>> with_max_gradients(state)["x"]["scale"].dtype
    fp8_meta32
    """
    check_leaves("quantizers", quantizers)
    for leaf in jax.tree.leaves(quantizers):
        if leaf.dtype not in (jnp.float32, fp32_max_grad):
            raise TypeError(f"quantizers must be states in float32, got {leaf.dtype}")
    return map_amax_states(lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), quantizers)


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

    It is the maximum over the leading axis, and the sum for counting states. A nan amax stays nan, so that the next
    scale is the old one, as for a single microbatch.

    Args:
        stacked: gradients of states of microbatches, loop iterations or pipeline stages, stacked: leaves ``[m, ...]``;
            Variables if some count.
    """
    check_leaves("stacked", stacked)
    for leaf in jax.tree.leaves(stacked):
        check_axes("a leaf of stacked", leaf)

    def merged(node: Any) -> Any:
        # A maximum is right for all leaves of delayed scaling: the scales are equal, because all were computed from the
        # common state, and the histories differ only in slot 0, the newest amax.
        return jax.tree.map(_largest if counting_of(node) is None else lambda leaf: jnp.sum(leaf, axis=0), node)

    return jax.tree.map(merged, stacked, is_leaf=lambda node: counting_of(node) is not None)


def has_counts(quantizers: PyTree) -> bool:
    """Return whether there are counting states, as those of routers."""
    found = nnx.to_flat_state(quantizers) if isinstance(quantizers, nnx.State) else []
    return any(counting_of(variable) is not None for _, variable in found)


def counts_within_step(quantizers: PyTree) -> dict[Any, Any]:
    """Return zeros, by path, for the states whose counts a step's later microbatches read."""
    found = nnx.to_flat_state(quantizers) if isinstance(quantizers, nnx.State) else []
    rules = [(path, variable, counting_of(variable)) for path, variable in found]
    return {path: variable.replace(jnp.zeros_like(variable.get_value())) for path, variable, rule in rules
            if rule is not None and rule.within_step}  # fmt: skip


def with_counts(quantizers: PyTree, counts: dict[Any, Any]) -> PyTree:
    """Return states as a step's next microbatch reads them; ``counts`` are the sums of the earlier ones' counts."""
    if not counts:
        return quantizers

    def read(path: Any, variable: Any) -> Any:
        if path not in counts:
            return variable
        return variable.replace(counting_of(variable).so_far(variable.get_value(), counts[path].get_value()))  # type: ignore[union-attr]

    return nnx.from_flat_state([(path, read(path, variable)) for path, variable in nnx.to_flat_state(quantizers)])


def added_counts(counts: dict[Any, Any], gradient: PyTree) -> dict[Any, Any]:
    """Return ``counts`` with those of a microbatch's gradient of the states added."""
    if not counts:
        return counts
    found = dict(nnx.to_flat_state(gradient))
    return {path: total.replace(total.get_value() + found[path].get_value()) for path, total in counts.items()}


def count(x: jax.Array, states: Sequence[QuantizerState | None], counts: Sequence[jax.Array | None]) -> jax.Array:
    """Return ``x``, in whose backward pass each state gets its count as its gradient.

    Args:
        x: array of the forward pass that the loss depends on.
        states: Variables with a rule of `Counting`; None: nothing.
        counts: summands of each state's gradient, in its shape.

    Raises:
        QuantizerStateError: when differentiated, for a derivative that leaves a state out whose rule is ``needed``.

    >>> state = QuantizerState(jnp.zeros(2), counting=Counting())
    >>> def loss(value):
    ...     return jnp.sum(count(jnp.ones(3), [state.replace(value)], [jnp.array([1.0, 2.0])]))
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 2.0]
    """
    pairs = [pair for pair in zip(states, counts, strict=True) if pair[0] is not None]
    if not pairs or scales_are_frozen.value:
        return x
    rules = tuple([counting_of(state) for state, _ in pairs])
    values = [state.get_value() for state, _ in pairs]  # type: ignore[union-attr]
    counted = [jax.lax.stop_gradient(number) for _, number in pairs]
    if counts_are_next_values.value:
        old = jax.lax.stop_gradient(values)
        counted = [rule.advance(*each) for rule, *each in zip(rules, old, counted, strict=True)]  # type: ignore[union-attr]
    return _count(rules, x, values, counted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _count(rules: tuple[Counting, ...], x: jax.Array, states: list[jax.Array], counts: list[jax.Array]) -> jax.Array:
    return x


def _count_fwd(rules: tuple[Counting, ...], x: Any, states: Any, counts: Any) -> tuple[jax.Array, Any]:
    for rule, state in zip(rules, states, strict=True):
        if rule.needed and not state.perturbed:
            raise QuantizerStateError(_COUNTS_LEFT_OUT.format(type(rule).__name__))
    return x.value, [number.value for number in counts]


def _count_bwd(rules: tuple[Counting, ...], counts: list[jax.Array], g: Any) -> tuple[Any, Any, Any]:
    g = jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g  # type: ignore[arg-type]
    return g, counts, None


# symbolic_zeros tells the rule which arguments are differentiated.
_count.defvjp(_count_fwd, _count_bwd, symbolic_zeros=True)

_COUNTS_LEFT_OUT = (
    "a derivative of a router in training leaves its state out ({}), whose gradient is what the call counted: it would "
    "never change. jax_te.training.value_and_grad and make_train_step write it back; in a loop of your own, "
    "differentiate it, too, argnums=nnx.DiffState(0, (nnx.Param, jax_te.quantize.QuantizerState)), and give its "
    "gradients to jax_te.training.Optimizer.update or jax_te.quantize.write_back. Such a loop is for models that call "
    "each layer once: of a layer that is called twice JAX adds the next scales, which then are nan. In evaluation, "
    "model.eval(), nothing is counted"
)


def _largest(leaf: jax.Array) -> jax.Array:
    """Maximum over the leading axis."""
    # nan is tested for, because XLA on CPU loses it from maxima over large arrays.
    return jnp.where(jnp.any(jnp.isnan(leaf), axis=0), jnp.nan, jnp.max(leaf, axis=0))


@checked
def write_back(old: PyTree, gradient: PyTree, *, keep_old: jax.Array | None = None) -> PyTree:
    """Return the states of the next step.

    They are the gradients of ``old``, or ``old`` for layers that did not run; for counting states, the results of their
    rules. A scale that one derivative of fp32 states used more than once becomes nan, because JAX has added its next
    values: `jax_te.value_and_grad` and `with_max_gradients` merge them.

    Args:
        old: states of this step; Variables if some count.
        gradient: gradients of the states, in fp32.
        keep_old: bool ``[]``, true for a skipped step, which keeps ``old``.
    """
    check_leaves("old", old)
    check_leaves("gradient", gradient)
    if keep_old is not None and keep_old.dtype != bool:
        raise TypeError(f"keep_old must be a bool array, got {keep_old.dtype}")
    before, treedef = jax.tree.flatten(nnx.as_pure(old), is_leaf=_is_amax_state)
    after = treedef.flatten_up_to(nnx.as_pure(gradient))
    rules = _rules(old)
    new: list[Any] = [None] * len(before)
    alike, leaf = collections.defaultdict(list), 0
    for index, states in enumerate(zip(before, after, strict=True)):
        rule = rules[leaf]
        leaf += len(jax.tree.leaves(states[0]))
        if rule is None:
            if not _is_amax_state(states[0]):
                raise TypeError(
                    "old must be states of quantizers, dicts of scale and amax_history, or Variables that count, "
                    f"got {brief(old)}"
                )
            alike[tuple(map(jax.typeof, jax.tree.leaves(states)))].append(index)  # on an Explicit mesh with sharding
            continue
        value = rule.advance(*states)
        new[index] = value if keep_old is None else jnp.where(keep_old, states[0], value)
    parts = [group[k : k + _TOGETHER] for group in alike.values() for k in range(0, len(group), _TOGETHER)]
    for part in parts:
        states = _carry_on([before[index] for index in part], [after[index] for index in part], keep_old)
        for index, state in zip(part, states, strict=True):
            new[index] = state
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(jax.tree.unflatten(treedef, new)))


def _rules(states: PyTree) -> list[Counting | None]:
    """Return the rule of each array, None for those of delayed scaling."""
    nodes = jax.tree.leaves(states, is_leaf=lambda node: counting_of(node) is not None)
    return [counting_of(node) for node in nodes]


def _carry_on(before: list[PyTree], after: list[PyTree], keep_old: jax.Array | None) -> list[PyTree]:
    """Return the next states of several states whose arrays have the same types."""
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    # With the barrier a few kernels read all states, and a few others write them. Without it XLA for GPUs has three
    # for each, two of them copies: a history that moves by a slot cannot be written over the one that is read.
    old, new = jax.lax.optimization_barrier((stack(*before), stack(*after)))
    # A layer that did not run has the gradient 0, or -inf in `with_max_gradients`'s dtype. Scales are positive.
    keep = ~(new["scale"] > 0.0)
    if keep_old is not None:
        keep = jnp.logical_or(keep, keep_old)
    added = ~keep & _are_sums(old, new)
    states = {
        "scale": jnp.where(keep, old["scale"], jnp.where(added, jnp.nan, new["scale"])),
        "amax_history": jnp.where(
            keep[..., None], old["amax_history"], jnp.where(added[..., None], jnp.nan, new["amax_history"])
        ),
    }
    return [jax.tree.map(lambda stacked, index=index: stacked[index], states) for index in range(len(before))]


def _are_sums(old: PyTree, new: PyTree) -> jax.Array:
    """Return which next states are sums of several: of fp32 states that one derivative used more than once, bool.

    A use shifts the history by one slot, or leaves it as it is (`frozen_scales`); the sum of two uses has each amax
    twice. Before the first amax was seen, a use keeps the scale.
    """
    history, shifted = old["amax_history"], new["amax_history"]
    least = float(jnp.finfo(jnp.float32).tiny)  # a GPU's maximum makes smaller values 0
    frozen = jnp.all(jnp.abs(shifted - history) <= least, axis=-1)
    twice = jnp.any(shifted[..., 1:] > 1.5 * history[..., :-1] + least, axis=-1)
    at_first = jnp.all(history == 0.0, axis=-1) & (new["scale"] > 1.5 * old["scale"])
    return ~frozen & (twice | at_first)


def _is_amax_state(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"scale", "amax_history"}
