"""Rotary embedding against rotation matrices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.layers import apply_rotary, rotary_embedding
from tests.layers.reference import ROUNDOFF, rotation
from tests.numerics import assert_close, draw

D = 8
TOLERANCE = 64 * ROUNDOFF["float32"]  # an angle of up to 32 radians is off by 32 roundings of 1


@pytest.mark.parametrize("positions", [np.arange(6), np.array([[0, 1, 2], [29, 30, 31]])], ids=["[s]", "[b, s]"])
def test_rotates_by_position_over_wavelength(positions: np.ndarray) -> None:
    s = positions.shape[-1]
    x = draw("x", (2, s, 3, D))
    rows = np.broadcast_to(positions, (2, s))
    expected = np.stack([np.einsum("sij,snj->sni", rotation(row, D, 100.0), x[i]) for i, row in enumerate(rows)])
    y = apply_rotary(x, rotary_embedding(jnp.asarray(positions), D, 100.0))
    assert_close(y, expected, TOLERANCE)


def test_computes_in_fp32_and_returns_the_dtype_of_its_input() -> None:
    x = draw("x", (1, 4, 1, D), jnp.bfloat16)
    rotary = rotary_embedding(jnp.arange(4), D)
    y = apply_rotary(x, rotary)
    assert y.dtype == jnp.bfloat16
    assert (y == apply_rotary(x.astype(jnp.float32), rotary).astype(jnp.bfloat16)).all()


def test_bad_sizes_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="needs an even head size, got 5"):
        rotary_embedding(jnp.arange(4), 5)
    with pytest.raises(ValueError, match="base must be > 0"):
        rotary_embedding(jnp.arange(4), D, 0.0)
    with pytest.raises(ValueError, match="rotary embedding of head size 8 for heads of size 16"):
        apply_rotary(draw("x", (1, 4, 1, 16)), rotary_embedding(jnp.arange(4), D))
