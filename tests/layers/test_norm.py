"""LayerNorm and RMSNorm against the formula in fp64."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import LayerNorm, RMSNorm, make_norm
from tests.support import reference
from tests.support.numerics import assert_close, draw, value_and_vjp
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

H = 32
TOLERANCE = 4 * ROUNDOFF["float32"] * H**0.5  # two sums over H and the arithmetic around them


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_follows_the_formula(rms: bool, zero_centered: bool) -> None:
    form = Form(rms=rms, zero_centered=zero_centered, epsilon=1e-3)
    kind = RMSNorm if rms else LayerNorm
    layer = randomize(kind(H, 1e-3, zero_centered_gamma=zero_centered, rngs=nnx.Rngs(0)))
    x, g = draw("x", (4, H), shift=0.5), draw("g", (4, H))
    y, (d_layer, dx) = value_and_vjp(lambda layer, x: layer(x), (layer, x), g)
    expected, (dp, expected_dx) = value_and_vjp64(
        lambda p, x: reference.norm(jnp, x, p["scale"], p.get("bias"), form), (parameters(layer), x), g
    )
    assert_close(y, expected, TOLERANCE)
    assert_close(dx, expected_dx, TOLERANCE)
    assert parameters(d_layer).keys() == dp.keys() == ({"scale"} if rms else {"scale", "bias"})
    for name, value in parameters(d_layer).items():
        assert_close(value, dp[name], TOLERANCE, what=name)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_starts_as_the_plain_normalization(zero_centered: bool) -> None:
    x = draw("x", (4, H))
    layer = make_norm("RMSNorm", H, zero_centered_gamma=zero_centered, rngs=nnx.Rngs(0))
    assert_close(layer(x), x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5), TOLERANCE)


def test_keeps_the_dtype_of_its_input() -> None:
    layer = make_norm("LayerNorm", H, rngs=nnx.Rngs(0))
    assert (layer(draw("x", (4, H), jnp.bfloat16)).dtype, layer.scale.dtype) == (jnp.bfloat16, jnp.float32)


def test_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="must be one of 'LayerNorm', 'RMSNorm', got 'layernorm'"):
        make_norm("layernorm", H, rngs=nnx.Rngs(0))
