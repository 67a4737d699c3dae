"""The activation times the probability of each row: its backward kernel in Pallas's interpreter, against JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import Activation, activation, weighted_activation
from jax_te.ops.moe import weighted_act as op
from tests.support.numerics import draw, relative_l2

interpreted = pytest.mark.skipif(
    jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 has no interpreter for these kernels"
)
ACTIVATIONS = {"swiglu": 2, "clamped_swiglu": 2, "gelu": 1}


def separate(x, weights, name):
    z = activation(x, name, backend="xla")
    return (z.astype(jnp.float32) * weights[:, None]).astype(z.dtype)


def interpret(monkeypatch):
    """As on a Hopper GPU, with the kernel in the interpreter."""
    monkeypatch.setattr(op, "supported", lambda: (True, "interpreted"))
    monkeypatch.setattr(op, "weighted_act_backward", functools.partial(op.weighted_act_backward, interpret=True))


def arrays(name, f=192, rows=128, dtype=jnp.bfloat16):
    x, dy = draw("x", (rows, ACTIVATIONS[name], f), dtype), draw("dy", (rows, f), dtype)
    return x, jnp.abs(draw("w", (rows,))), dy


def check(name, x, weights, dy):
    """Compare with two operations. Their fp32 arithmetic may differ by a rounding, which turns another one over.

    Forward may lack the rounding between them, at most 2^-9, which compilers leave out where both are one fusion.
    """
    y, backward = jax.vjp(lambda x, w: weighted_activation(x, w, Activation(name)), x, weights)
    expected, expected_backward = jax.vjp(lambda x, w: separate(x, w, name), x, weights)
    assert relative_l2(y, expected) < 2.0**-9
    (dx, dw), (expected_dx, expected_dw) = backward(dy), expected_backward(dy)
    assert relative_l2(dx, expected_dx) < 2.0**-10  # few values by one of 2^-9
    assert relative_l2(dw, expected_dw) < 2.0**-10


@pytest.mark.costly("clamped_swiglu", slow=("swiglu",))
@interpreted
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_it_has_the_numbers_of_two_operations(monkeypatch, name):
    interpret(monkeypatch)
    check(name, *arrays(name))


@interpreted
def test_second_derivatives_are_refused(monkeypatch):
    interpret(monkeypatch)
    x, weights, _ = arrays("swiglu")
    slope = jax.grad(lambda x: jnp.sum(weighted_activation(x, weights, Activation("swiglu")).astype(jnp.float32) ** 2))
    with pytest.raises(TypeError, match="second derivatives"):
        jax.grad(lambda x: jnp.sum(slope(x).astype(jnp.float32)))(x)


def test_it_runs_on_one_hopper_gpu_alone():
    x, weights, _ = arrays("swiglu")
    assert not op.runs_here(x, weights)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must go together"):
        op.weighted_act_backward(jnp.ones((8, 64)), jnp.ones((12, 2, 64)), jnp.ones(12), lambda parts: parts[0])
    assert np.array(op.columns_of(96)) == 32
