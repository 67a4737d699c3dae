import jax.numpy as jnp
import pytest

from jax_te.config import ACTIVATIONS
from jax_te.ops import activation
from tests import oracles
from tests.numerics import TOLERANCE, assert_close, draw, optimized_jit, value_and_vjp, wide, with_vjp


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradient(name, dtype):
    x, dz = draw("x", (4, 8, len(ACTIVATIONS[name]), 32), dtype, scale=2.0), draw("dz", (4, 8, 32), dtype)
    # Without optimization gelu's fp32 slope is 9e-6 off near x = 7, with it at most 4e-6.
    run = optimized_jit(lambda x, dz: with_vjp(lambda x: activation(x, name, backend="xla"), (x,), dz))
    z, (dx,) = run(x, dz)
    assert (z.dtype, dx.dtype) == (x.dtype, x.dtype)
    assert_close(z, oracles.activation(wide(x), name), TOLERANCE[dtype], what="z")
    assert_close(dx, oracles.activation_vjp(wide(dz), wide(x), name), TOLERANCE[dtype], what="dx")


def test_the_oracle_knows_every_activation():
    assert oracles.COMPONENTS == ACTIVATIONS


def test_eager_float16():
    x = draw("x", (8, 2, 32), jnp.float16)
    assert_close(activation(x, "swiglu", backend="xla"), oracles.activation(wide(x), "swiglu"), TOLERANCE["float16"])


def test_large_inputs_stay_finite():
    x = jnp.array([[-1e4, -50.0, 0.0, 50.0, 1e4]])
    for name in ("gelu", "relu", "silu"):
        z, (dx,) = value_and_vjp(lambda x, name=name: activation(x, name, backend="xla"), (x,), jnp.ones(5))
        assert z.tolist() == pytest.approx([0.0, 0.0, 0.0, 50.0, 1e4], abs=1e-12)
        assert jnp.isfinite(dx).all()


def test_errors():
    with pytest.raises(ValueError, match="unknown activation 'tanh'; allowed: gelu, relu, silu, geglu, reglu, swiglu"):
        activation(jnp.ones((2, 1, 4)), "tanh")
    with pytest.raises(ValueError, match=r"activation: x must be \[..., 2, f\] for 'swiglu', got \(4, 1, 8\)"):
        activation(jnp.ones((4, 1, 8)), "swiglu")
    with pytest.raises(ValueError, match=r"must be \[..., 1, f\] for 'gelu', got \(8,\)"):
        activation(jnp.ones(8), "gelu")
