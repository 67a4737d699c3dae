"""The activation times the probability of each row: its backward kernel in Pallas's interpreter, against JAX's."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import ACTIVATIONS, LimitedFunction
from jax_te.ops import Activation, activation, weighted_activation
from jax_te.ops.moe import weighted_act as op
from tests.support.numerics import draw, relative_l2

interpreted = pytest.mark.skipif(
    jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 has no interpreter for these kernels"
)
IN_KERNEL = sorted(ACTIVATIONS.keys() - {"gelu_exact"})


def separate(x, weights, name):
    z = activation(x, name, backend="xla")
    return (z.astype(jnp.float32) * weights[:, None]).astype(z.dtype)


def interpret(monkeypatch):
    """As on a Hopper GPU, with the kernel in the interpreter."""
    monkeypatch.setattr(op, "supported", lambda: (True, "interpreted"))
    monkeypatch.setattr(op, "weighted_act_backward", functools.partial(op.weighted_act_backward, interpret=True))


def arrays(name, f=192, rows=128, dtype=jnp.bfloat16):
    x, dy = draw("x", (rows, len(ACTIVATIONS[name]), f), dtype), draw("dy", (rows, f), dtype)
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


@interpreted
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "gelu", "srelu"])
def test_it_has_the_numbers_of_two_operations(monkeypatch, name):
    interpret(monkeypatch)
    check(name, *arrays(name))


@interpreted
@pytest.mark.parametrize("name", IN_KERNEL)
def test_pallas_has_every_named_activation(name):
    x, weights, dy = arrays(name, f=64, rows=16)
    function = op._function(Activation(name))
    backward = jax.jit(lambda dy, x, weights: op.weighted_act_backward(dy, x, weights, function))
    text = backward.trace(dy, x, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "output_operand_alias" in text  # the gradient of x is in the memory of x


@pytest.mark.parametrize("function", ["gelu_exact", jnp.tanh, LimitedFunction(jnp.tanh, high=2.0)], ids=str)
def test_functions_that_pallas_may_not_have_are_two_operations(monkeypatch, function):
    interpret(monkeypatch)
    x, weights, _ = arrays("gelu")
    assert op.runs_here(x, weights, Activation("gelu"))
    assert not op.runs_here(x, weights, Activation(function))


@interpreted
def test_second_derivatives_are_refused(monkeypatch):
    interpret(monkeypatch)
    x, weights, _ = arrays("swiglu")
    slope = jax.grad(lambda x: jnp.sum(weighted_activation(x, weights, Activation("swiglu")).astype(jnp.float32) ** 2))
    with pytest.raises(TypeError, match="second derivatives"):
        jax.grad(lambda x: jnp.sum(slope(x).astype(jnp.float32)))(x)


def test_it_runs_on_one_hopper_gpu_alone():
    x, weights, _ = arrays("swiglu")
    assert not op.runs_here(x, weights, Activation("swiglu"))


@pytest.mark.parametrize(("rows", "f"), [(24, 64), (16, 96)])
def test_shapes_that_do_not_fit_are_refused(rows, f):
    x, weights, dy = arrays("swiglu", f, rows)
    with pytest.raises(ValueError, match="rows a multiple of 16 and f of 64"):
        op.weighted_act_backward(dy, x, weights, lambda parts: parts[0])


def test_other_dtypes_are_refused():
    x, weights, dy = arrays("swiglu")
    with pytest.raises(TypeError, match="both be bfloat16 or both float16"):
        op.weighted_act_backward(dy.astype(jnp.float32), x, weights, lambda parts: parts[0])
