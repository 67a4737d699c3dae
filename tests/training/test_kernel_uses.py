"""Uses of a program's inputs, which jax_te reads from JAX's jaxprs: each of JAX's ways to write a loop or a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import scan_layers
from jax_te.training.kernel_uses import Use, uses_of_inputs


@jax.custom_vjp
def op(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


op.defvjp(lambda x, kernel: (op(x, kernel), (x, kernel)), lambda residuals, dy: residuals)


def scan(x: Any, kernel: Any) -> Any:
    return jax.lax.scan(lambda x, _: (op(x, kernel), None), x, None, length=2)[0]


def scan_of_slices(x: Any, kernel: Any) -> Any:
    return jax.lax.scan(lambda x, kernel: (op(x, kernel), None), x, jnp.stack([kernel, kernel]))[0]


def while_loop(x: Any, kernel: Any) -> Any:
    return jax.lax.while_loop(lambda x: x[0, 0] < 1.0, lambda x: op(x, kernel), x)


def cond(x: Any, kernel: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0.0, lambda: x, lambda: op(x, kernel))


def carried(x: Any, kernel: Any) -> Any:
    """The second iteration reads what the first has computed from the kernel, without a result that depends on it."""
    return jax.lax.scan(lambda carry, _: ((op(x, carry[1]), x @ kernel), None), (x, x), None, length=2)[0][0]


def layer_loop(x: Any, kernel: Any) -> Any:
    return scan_layers(lambda x, _: (op(x, kernel), None), x, [jnp.ones(()), jnp.ones(())])[0]


def layer_loop_of_slices(x: Any, kernel: Any) -> Any:
    return scan_layers(lambda x, kernel: (op(x, kernel), None), x, [kernel, kernel])[0]


def layer_loop_with_penalty(x: Any, kernel: Any) -> Any:
    return scan_layers(lambda x, kernel: (op(x, kernel) + jnp.sum(kernel**2), None), x, [kernel, kernel])[0]


def layer_loop_without_carry(x: Any, kernel: Any) -> Any:
    return sum(scan_layers(lambda _, kernel: ((), op(x, kernel) + jnp.sum(kernel**2)), (), [kernel, kernel])[1])


ONCE = {Use(2, repeated=False, operands=1, beside=frozenset({0, 1}))}
AGAIN = {Use(2, repeated=True, operands=1, beside=frozenset({0, 1}))}
KERNEL = {Use(2, repeated=False, operands=1, beside=frozenset({1}))}
BOTH = {Use(2, repeated=False, operands=2, beside=frozenset({0, 1}))}


@pytest.mark.parametrize(
    ("program", "calls", "in_results"),
    [
        (op, ONCE, False),
        (lambda x, kernel: op(x, 2.0 * kernel.astype(jnp.bfloat16).astype(jnp.float32)), ONCE, False),
        (lambda x, kernel: x @ kernel, set(), True),
        (lambda x, kernel: x @ op(x, kernel), ONCE, False),
        (lambda x, kernel: op(x, kernel) + jnp.sum(kernel**2), ONCE, True),
        (lambda x, kernel: op(x @ kernel, kernel), BOTH, False),
        (lambda x, kernel: op(jnp.ones_like(x), kernel), KERNEL, False),
        (lambda x, kernel: op(x, kernel) + jax.lax.stop_gradient(kernel), ONCE, False),
        (lambda x, kernel: op(x, kernel) + (kernel > 0.0).astype(jnp.float32), ONCE, False),
        (jax.jit(op), ONCE, False),
        (jax.checkpoint(op), ONCE, False),
        (cond, ONCE, False),
        (scan, AGAIN, False),
        (jax.jit(scan), AGAIN, False),
        (scan_of_slices, ONCE, False),
        (while_loop, AGAIN, False),
        (layer_loop, AGAIN, False),
        (layer_loop_of_slices, ONCE, False),
        (layer_loop_with_penalty, ONCE | BOTH, True),
        (layer_loop_without_carry, ONCE, True),
        (carried, {use._replace(repeated=True) for use in ONCE}, False),
    ],
    ids=[
        *("op", "cast", "no op", "result", "penalty", "both operands", "alone", "stop_gradient", "comparison", "jit"),
        *("remat", "cond", "scan", "jit of scan", "slices", "while"),
        *("layer loop", "layers", "layers with penalty", "without carry", "carried"),
    ],
)
def test_uses_are_seen_in_every_kind_of_equation(program: Any, calls: set[Use], in_results: bool) -> None:
    """A kernel whose use is not seen would get a wrong gradient, without a word: this fails if JAX writes one anew."""
    x = jnp.ones((4, 4))
    uses = uses_of_inputs(jax.make_jaxpr(program)(x, x).jaxpr)
    assert uses.calls[1] == calls
    assert (1 in uses.results) == in_results
