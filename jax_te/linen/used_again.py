"""States that two calls of one derivative read: JAX adds their gradients, which in Linen are next values."""

from __future__ import annotations

import weakref
from typing import Any

import jax
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad
from jax.core import Tracer

from jax_te.errors import QuantizerStateError
from jax_te.quantize import QuantizerState

# By identity, which two calls of one derivative share: each derivative traces its variables as new objects. Weak, so
# that nothing is kept longer than its trace.
_read_by_a_call: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def check_used_once(module: nnx.Module, scope: str) -> None:
    """Let a derivative raise QuantizerStateError that reaches a state of ``module`` which an earlier call has read.

    Frozen scales are no exception, nor is evaluation: the gradient of a state is then the state or its next value.

    Args:
        module: module with its variables. The states that were read before are replaced by ones with the same values.
        scope: name for errors.
    """
    states = nnx.state(module, QuantizerState)
    for _, variable in nnx.to_flat_state(states):
        value = variable.get_value()
        # What is not traced is not differentiated, and gradients of the other dtype merge by maximum.
        if not isinstance(value, Tracer) or value.dtype == fp32_max_grad:
            continue
        if _read_by_a_call.get(id(value)) is value:
            variable.set_value(_used_again(value, scope))
        else:
            _read_by_a_call[id(value)] = value
    nnx.update(module, states)


def _used_again(state: jax.Array, scope: str) -> jax.Array:
    """Return ``state``, of which a derivative raises."""

    @jax.custom_vjp
    def used_again(state: jax.Array) -> jax.Array:
        return state

    def fwd(state: Any) -> tuple[jax.Array, None]:
        if state.perturbed:
            raise QuantizerStateError(_USED_AGAIN.format(scope))
        return state.value, None

    # symbolic_zeros tells the rule whether the state is differentiated.
    used_again.defvjp(fwd, lambda _, g: (g,), symbolic_zeros=True)
    return used_again(state)


_USED_AGAIN = (
    "{}: one derivative reads the state of this layer in two calls, and JAX adds the gradients of both. In Linen the "
    "gradient of a state is its next value: scales, histories and expert biases would be sums. Take "
    "jax_te.linen.value_and_grad in place of jax.value_and_grad, which merges them:\n"
    "    from jax_te.linen import value_and_grad\n"
    "    loss, grads = value_and_grad(loss_fn)(variables)\n"
    "A call whose result is not differentiated can do without: give it jax.lax.stop_gradient(variables), inside "
    "`with jax_te.quantize.frozen_scales():`"
)
