"""The oracles themselves: against ml_dtypes, and closed-form gradients against finite differences."""

import numpy as np
import pytest

from tests.support import oracles
from tests.support.oracles import E4M3, E5M2, F32


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_round_fp8_is_ml_dtypes_rounding(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    ties = (values[1:] + values[:-1]) / 2
    random = np.random.default_rng(0).normal(size=20_000) * np.exp2(np.random.default_rng(1).uniform(-20, 9, 20_000))
    x = np.concatenate(
        [values, ties, np.nextafter(F32(ties), F32(np.inf)), np.nextafter(F32(ties), F32(-np.inf)), random]
    )
    x = np.clip(x, values[0], values[-1])
    np.testing.assert_array_equal(oracles.round_fp8(F32(x), dtype), F32(x).astype(dtype).astype(np.float64))


def test_scale_from_amax_by_hand():
    assert oracles.scale_from_amax(F32(7), E4M3) == 64
    assert oracles.scale_from_amax(F32(7), E5M2, margin=1) == 4096
    assert oracles.scale_from_amax(F32(1e-38 * 2), E4M3) == oracles.F32_MAX
    for amax in (0.0, np.inf, np.nan):
        assert oracles.scale_from_amax(F32(amax), E4M3, old=F32(3)) == 3


@pytest.mark.parametrize("spec", [{}, {"kind": "rmsnorm"}, {"zero_centered": True}])
def test_norm_vjp_is_the_numeric_gradient(spec):
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 3, 6))
    scale, bias = rng.normal(size=6), rng.normal(size=6)
    numeric = oracles.numeric_vjp(lambda x, s, b: oracles.norm(x, s, b, **spec), (x, scale, bias), g)
    for ours, theirs in zip(oracles.norm_vjp(g, x, scale, **spec), numeric, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", list(oracles.COMPONENTS))
def test_mlp_layer_gradients_are_the_numeric_ones(name):
    rng = np.random.default_rng(0)
    parts = len(oracles.COMPONENTS[name])
    shapes = {
        "x": (3, 4),
        "scale": (4,),
        "ln_bias": (4,),
        "wi": (4, parts, 5),
        "wi_bias": (parts, 5),
        "wo": (5, 4),
        "wo_bias": (4,),
    }
    args = [rng.normal(size=shape) for shape in shapes.values()]
    g = rng.normal(size=(3, 4))
    plain = (oracles.Unquantized(), oracles.Unquantized())
    layer = oracles.norm_mlp_layer(plain, *args, g, name=name)
    numeric = oracles.numeric_vjp(lambda *a: oracles.norm_mlp_layer(plain, *a, g, name=name)["y"], args, g)
    for key, expected in zip(shapes, numeric, strict=True):
        np.testing.assert_allclose(layer[key], expected, rtol=1e-5, atol=1e-7, err_msg=key)
