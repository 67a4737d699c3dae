"""The output head: logits, and gradients that are those of the plain formula."""

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import head_logits
from tests.support.numerics import assert_close

TOLERANCE = 1e-6  # both sum 25 products in fp32 at most, in another order
AXES = ("batch", "sequence", "hidden")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [24, 25])
def test_logits_and_gradients_are_those_of_the_formula(size, tied, bias):
    keys = jax.random.split(jax.random.key(0), 4)
    x, kernel = jax.random.normal(keys[0], (2, 4, 16)), jax.random.normal(keys[1], (size, 16) if tied else (16, size))
    b = jax.random.normal(keys[2], (size,)) if bias else None
    g = jax.random.normal(keys[3], (2, 4, size))

    def formula(x, kernel, b):
        logits = x @ (kernel.T if tied else kernel)
        return logits if b is None else logits + b[None, None]

    ours, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel, b)
    wanted, wanted_vjp = jax.vjp(formula, x, kernel, b)
    assert_close(ours, wanted, TOLERANCE)
    for mine, theirs in zip(jax.tree.leaves(vjp(g)), jax.tree.leaves(wanted_vjp(g)), strict=True):
        assert_close(mine, theirs, TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_have_the_dtypes_of_what_they_belong_to(tied):
    x, kernel, bias = jnp.ones((1, 2, 16), jnp.bfloat16), jnp.ones((16, 16)), jnp.ones(16, jnp.bfloat16)
    out, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel, bias)
    assert [out.dtype, *(grad.dtype for grad in vjp(out))] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16]
