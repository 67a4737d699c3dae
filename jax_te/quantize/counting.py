"""States that count: their gradient is a count, from which a rule computes the next value once a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from jax_te.errors import QuantizerStateError
from jax_te.quantize.scaling import scales_are_frozen
from jax_te.typing import PyTree


@dataclass(frozen=True)
class Counting:
    """Base of the rules of counting states. A rule is static, and compared by its fields.

    Class attributes:
        needed: a derivative of a layer in training that leaves the state out raises, since it would never change.
        within_step: later microbatches of a step read what the earlier ones counted, see `so_far`.
        persistent: a state dict holds the state; a checkpoint of a train state holds all.

    >>> from jax_te.quantize import QuantizerState, write_back
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


def has_counts(quantizers: PyTree) -> bool:
    """Return whether there are counting states, as those of routers."""
    found = nnx.to_flat_state(quantizers) if isinstance(quantizers, nnx.State) else []
    return any(counting_of(variable) is not None for _, variable in found)


def counts_within_step(quantizers: PyTree) -> dict[Any, Any]:
    """Return zeros, by path, for the states whose counts a step's later microbatches read."""
    found = nnx.to_flat_state(quantizers) if isinstance(quantizers, nnx.State) else []
    zeros = {}
    for path, variable in found:
        rule = counting_of(variable)
        if rule is not None and rule.within_step:
            zeros[path] = variable.replace(jnp.zeros_like(variable.get_value()))
    return zeros


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


def count(x: jax.Array, states: Sequence[nnx.Variable | None], counts: Sequence[jax.Array | None]) -> jax.Array:
    """Return ``x``, in whose backward pass each state gets its count as its gradient.

    Args:
        x: array of the forward pass that the loss depends on.
        states: Variables with a rule of `Counting`; None: nothing.
        counts: summands of each state's gradient, in its shape.

    Raises:
        QuantizerStateError: when differentiated, for a derivative that leaves a state out whose rule is ``needed``.

    >>> from jax_te.quantize import QuantizerState
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
    "gradients to jax_te.training.Optimizer.update or jax_te.quantize.write_back. In evaluation, model.eval(), nothing "
    "is counted"
)
