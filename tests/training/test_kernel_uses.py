"""Uses of a program's inputs, which jax_te reads from JAX's jaxprs: each of JAX's ways to write a loop or a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.training.kernel_uses import Use, has_loops, uses_of_inputs


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


ONCE, AGAIN = {Use(2, repeated=False)}, {Use(2, repeated=True)}


@pytest.mark.parametrize(
    ("program", "uses", "loops"),
    [
        (op, ONCE, False),
        (lambda x, kernel: op(x, 2.0 * kernel.astype(jnp.bfloat16).astype(jnp.float32)), ONCE, False),
        (lambda x, kernel: x @ kernel, set(), False),
        (lambda x, kernel: x @ op(x, kernel), ONCE, False),
        (jax.jit(op), ONCE, False),
        (jax.checkpoint(op), ONCE, False),
        (cond, ONCE, False),
        (scan, AGAIN, True),
        (jax.jit(scan), AGAIN, True),
        (scan_of_slices, ONCE, True),
        (while_loop, AGAIN, True),
    ],
    ids=["op", "cast", "no op", "result", "jit", "remat", "cond", "scan", "jit of scan", "slices", "while"],
)
def test_uses_are_seen_in_every_kind_of_equation(program: Any, uses: set[Use], loops: bool) -> None:
    """A kernel whose use is not seen would get a wrong gradient, without a word: this fails if JAX writes one anew."""
    x = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(program)(x, x)
    assert uses_of_inputs(jaxpr.jaxpr)[1] == uses
    assert has_loops(jaxpr.jaxpr) == loops
