"""The kernel of an activation's backward, times the probability of each row, on a Hopper GPU."""

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import Activation, weighted_activation
from jax_te.ops.moe.weighted_act import runs_here
from tests.ops.moe.test_weighted_act import ACTIVATIONS, arrays, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("f", [768, 2880])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_it_has_the_numbers_of_two_operations(name, f):
    x, weights, dy = arrays(name, f, 1024)
    assert runs_here(x, weights)
    check(name, x, weights, dy)


def test_an_input_that_is_read_later_keeps_its_values():
    """The gradient takes the memory of the input only where nothing else reads it."""
    x, weights, dy = arrays("swiglu", 768, 1024)

    @jax.jit
    def both(x, weights, dy):
        hidden = x * 2
        _, backward = jax.vjp(lambda hidden: weighted_activation(hidden, weights, Activation("swiglu")), hidden)
        return backward(dy)[0], jnp.sin(hidden.astype(jnp.float32))

    _, later = both(x, weights, dy)
    assert jnp.allclose(later, jnp.sin((x * 2).astype(jnp.float32)), atol=1e-5)
