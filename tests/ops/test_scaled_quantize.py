"""The Pallas kernel that quantizes by given scales, in Pallas's GPU interpreter, against NumPy bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_te.ops.pallas.scaled_quantize import scaled_quantize
from tests.support.numerics import assert_bitwise, draw

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
interpreted = pytest.mark.skipif(
    jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 has no interpreter for these kernels"
)


def expected(x, scale, dtype):
    limit = np.float32(ml_dtypes.finfo(NUMPY[dtype]).max)
    x = np.asarray(x).astype(np.float32)
    rows = np.clip(x * np.asarray(scale).repeat(128, 1)[..., None], -limit, limit).astype(NUMPY[dtype])
    e, m, _ = x.shape
    amax = np.abs(x).reshape(e, m // 128, -1).max(-1)  # NumPy's maximum is nan where there is one
    return rows, np.ascontiguousarray(rows.swapaxes(1, 2)), amax


def operands(high=jnp.bfloat16):
    x = draw("x", (2, 256, 384), scale=30.0).astype(high)
    return x, jnp.array([[0.5, 3.0], [100.0, 1e-3]], jnp.float32)


def check(actual, wanted):
    for one, other in zip(actual, wanted, strict=True):
        assert_bitwise(one, other)


@pytest.mark.costly("bf16-E5M2", slow=("fp16-E4M3", "fp32-E4M3", "bf16-E4M3", "fp16-E5M2"))
@interpreted
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("high", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["fp32", "bf16", "fp16"])
def test_rows_columns_and_amaxes(high, dtype):
    x, scale = operands(high)
    check(scaled_quantize(x, scale, dtype, interpret=True), expected(x, scale, dtype))


@interpreted
def test_nan_and_inf_are_seen_in_their_rows():
    x, scale = operands()
    x = x.at[0, 3, 5].set(jnp.nan).at[1, 200, 300].set(-jnp.inf)
    rows, columns, amax = scaled_quantize(x, scale, E4M3, interpret=True)
    assert np.isnan(np.asarray(rows).astype(np.float32)[0, 3, 5])
    assert np.isnan(np.asarray(columns).astype(np.float32)[0, 5, 3])
    assert np.isnan(amax[0, 0])
    assert np.isinf(amax[1, 1])
    assert np.isfinite(np.asarray(amax)[[0, 1], [1, 0]]).all()


@pytest.mark.parametrize(
    ("error", "x", "scale"),
    [
        (TypeError, jnp.zeros((1, 128, 128), E4M3), jnp.ones((1, 1))),
        (ValueError, jnp.zeros((1, 64, 128)), jnp.ones((1, 1))),
        (ValueError, jnp.zeros((128, 128)), jnp.ones((1, 1))),
        (ValueError, jnp.zeros((1, 128, 128)), jnp.ones((1, 2))),
    ],
    ids=["dtype", "rows", "rank", "scale"],
)
def test_what_does_not_fit_is_refused(error, x, scale):
    with pytest.raises(error, match="must be"):
        scaled_quantize(x, scale, E4M3)
