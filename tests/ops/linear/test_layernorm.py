import jax.numpy as jnp
import pytest

from jax_te.ops import NormSpec, layernorm
from tests.support import oracles
from tests.support.numerics import TOLERANCE, assert_close, draw, value_and_vjp, wide

SPECS = {
    "layernorm": (NormSpec(), {}),
    "zero centred": (NormSpec(zero_centered_gamma=True, epsilon=1e-3), {"zero_centered": True, "epsilon": 1e-3}),
    "rmsnorm": (NormSpec(kind="rmsnorm"), {"kind": "rmsnorm"}),
    "rmsnorm, zero centred": (
        NormSpec(kind="rmsnorm", zero_centered_gamma=True),
        {"kind": "rmsnorm", "zero_centered": True},
    ),
}


def inputs(dtype, params_dtype=jnp.float32, *, bias=True):
    x, g = draw("x", (2, 8, 32), dtype, shift=0.5), draw("g", (2, 8, 32), dtype)
    return x, draw("scale", (32,), params_dtype, shift=1.0), draw("ln_bias", (32,), params_dtype) if bias else None, g


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients(name, dtype):
    norm, spec = SPECS[name]
    x, scale, bias, g = inputs(dtype, bias=norm.kind == "layernorm")
    y, (dx, dscale, dbias) = value_and_vjp(lambda *a: layernorm(*a, norm=norm, backend="xla"), (x, scale, bias), g)
    assert [a.dtype for a in (y, dx, dscale)] == [x.dtype, x.dtype, jnp.float32]
    wide_x, wide_scale, wide_g = oracles.wide(x, scale, g)
    expected = oracles.norm(wide_x, wide_scale, oracles.wide(bias)[0], **spec)
    expected_dx, expected_dscale, expected_dbias = oracles.norm_vjp(wide_g, wide_x, wide_scale, **spec)
    assert_close(y, expected, TOLERANCE[dtype], what="y")
    assert_close(dx, expected_dx, TOLERANCE[dtype], what="dx")
    assert_close(dscale, expected_dscale, TOLERANCE["float32"], what="dscale: fp32 inside")
    if bias is None:
        assert dbias is None
    else:
        assert dbias.dtype == jnp.float32
        assert_close(dbias, expected_dbias, TOLERANCE["float32"], what="dbias")


def test_eager_float16_and_gradient_dtypes():
    x, scale, bias, g = inputs(jnp.float16, jnp.bfloat16)
    y, (dx, dscale, dbias) = value_and_vjp(lambda *a: layernorm(*a, backend="xla"), (x, scale, bias), g, jit=False)
    assert [a.dtype.name for a in (y, dx, dscale, dbias)] == ["float16", "float16", "bfloat16", "bfloat16"]
    assert_close(y, oracles.norm(wide(x), wide(scale), wide(bias)), TOLERANCE["float16"])


def test_a_large_offset_does_not_cancel():
    """Variance is the mean of squared deviations, not a difference of means: an offset of 1000 costs digits of x, not
    of the variance.
    """
    x, scale, bias, _ = inputs(jnp.float32)
    shifted = x + 1000.0
    assert_close(
        layernorm(shifted, scale, bias, backend="xla"), oracles.norm(wide(shifted), wide(scale), wide(bias)), 1e-4
    )


def test_layernorm_without_a_bias():
    x, scale, _, _ = inputs(jnp.float32)
    assert_close(layernorm(x, scale, backend="xla"), oracles.norm(wide(x), wide(scale), None), TOLERANCE["float32"])


def test_errors():
    x = jnp.ones((4, 16))
    with pytest.raises(ValueError, match=r"layernorm: the norm's .* \(16,\), .* got \(\(8,\)"):
        layernorm(x, jnp.ones(8))
    with pytest.raises(ValueError, match=r"must have shape \(16,\), .*got .*\(1, 16\)"):
        layernorm(x, jnp.ones(16), jnp.ones((1, 16)))
    with pytest.raises(ValueError, match=r"RMS norm has no bias; pass None, or NormSpec\(kind='layernorm'\)"):
        layernorm(x, jnp.ones(16), jnp.ones(16), norm=NormSpec(kind="rmsnorm"))
    with pytest.raises(ValueError, match=r"epsilon must be > 0, got 0.0"):
        NormSpec(epsilon=0.0)
