"""Rotary embedding against rotation matrices."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.layers import LinearScaling, Llama3Scaling, YarnScaling, apply_rotary, rotary_embedding
from tests.support.numerics import assert_bitwise, assert_close, draw, value_and_vjp
from tests.support.reference import ROUNDOFF, rotation

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


def test_the_features_beyond_the_percentage_pass_through() -> None:
    x = draw("x", (1, 5, 2, 2 * D), jnp.bfloat16)
    y = apply_rotary(x, rotary_embedding(jnp.arange(5), 2 * D, rotary_percent=0.5))
    assert_bitwise(y[..., D:], x[..., D:])
    assert_bitwise(y[..., :D], apply_rotary(x[..., :D], rotary_embedding(jnp.arange(5), D)))


@pytest.mark.costly("0.75")
@pytest.mark.parametrize("percent", [1.0, 0.75])
def test_interleaved_pairs_are_neighbours(percent: float) -> None:
    positions, r = np.arange(6), int(D * percent)
    x, g = draw("x", (2, 6, 3, D)), draw("g", (2, 6, 3, D))
    expected = np.array(x, np.float64)
    for position in positions:
        for i in range(r // 2):
            z = expected[:, position, :, 2 * i] + 1j * expected[:, position, :, 2 * i + 1]
            z = z * np.exp(1j * position / 100.0 ** (2 * i / r))
            expected[:, position, :, 2 * i], expected[:, position, :, 2 * i + 1] = z.real, z.imag
    rotary = rotary_embedding(jnp.asarray(positions), D, 100.0, rotary_percent=percent, interleaved=True)
    y, (dx,) = value_and_vjp(lambda x: apply_rotary(x, rotary), (x,), g)
    assert_close(y, expected, TOLERANCE)
    # The gradient is rotated back: the scalar product of two vectors that are rotated alike does not change.
    assert_close(jnp.sum(apply_rotary(dx, rotary) * x), jnp.sum(g * x), TOLERANCE)


def frequencies(scaling: Any, d: int, base: float) -> tuple[np.ndarray, float]:
    """Frequencies as seen in the rotation at position 1, and the length of the rotated unit vectors."""
    rotary = rotary_embedding(jnp.ones((1,), jnp.int32), d, base, scaling=scaling)
    cos, sin = np.float64(rotary.cos[0]), np.float64(rotary.sin[0])
    length = np.hypot(cos, sin)
    assert_close(length, np.full(d // 2, length[0]), TOLERANCE)
    return np.arctan2(sin, cos), float(length[0])


def test_linear_scaling_divides_positions() -> None:
    x = draw("x", (1, 4, 1, D))
    stretched = rotary_embedding(jnp.arange(4) * 4, D, scaling=LinearScaling(factor=4.0))
    assert_close(apply_rotary(x, stretched), apply_rotary(x, rotary_embedding(jnp.arange(4), D)), TOLERANCE)


@pytest.mark.parametrize("scaling", [Llama3Scaling(), Llama3Scaling(factor=32.0, high_freq_factor=8.0)])
def test_llama3_scaling_stretches_long_wavelengths(scaling: Llama3Scaling) -> None:
    d, base, expected = 32, 500000.0, []
    kinds = set()
    for i in range(d // 2):
        wavelength = 2 * math.pi * base ** (2 * i / d)
        longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
        shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
        stretched = wavelength * scaling.factor
        if wavelength < shortest:
            expected.append(2 * math.pi / wavelength)
        elif wavelength > longest:
            expected.append(2 * math.pi / stretched)
        else:
            share = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
            share /= scaling.high_freq_factor - scaling.low_freq_factor
            expected.append(2 * math.pi * (share / wavelength + (1 - share) / stretched))
        kinds.add((wavelength < shortest, wavelength > longest))
    assert len(kinds) == 3
    found, length = frequencies(scaling, d, base)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert length == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [
        (YarnScaling(factor=16.0), 0.1 * math.log(16) + 1),
        (YarnScaling(factor=40.0, mscale=0.707, mscale_all_dim=0.707), 1.0),
        (YarnScaling(factor=8.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25, round_range=False), 1.25),
    ],
)
def test_yarn_scaling_ramps_between_two_numbers_of_turns(scaling: YarnScaling, amplitude: float) -> None:
    d, base, length = 64, 10000.0, scaling.original_max_position_embeddings

    def index(turns: float) -> float:
        """Of the frequency with which the original context is ``turns`` times the wavelength."""
        return d / 2 * math.log(length / (turns * 2 * math.pi), base)

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.round_range:
        first, last = math.floor(first), math.ceil(last)
    assert 0 < first < last < d / 2
    expected = []
    for i in range(d // 2):
        plain = base ** (-2 * i / d)
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append(plain * (1 - share) + plain / scaling.factor * share)
    found, size = frequencies(scaling, d, base)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert size == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize(
    ("d", "length", "options", "shares"),
    [
        # beta_slow's index, 16.4, lies behind the bound: the ramp ends at the head size less 1.
        (16, 1_000_000_000, {"base": 10000.0, "beta_fast": 1e5}, [(i - 6) / (15 - 6) for i in range(8)]),
        # beta_fast's index, 11.5, lies behind that bound, 7: the ramp falls there, and all frequencies are divided.
        (8, 1_000_000_000, {"base": 10.0}, [1.0] * 4),
        # Both indices lie before the first: nothing is divided.
        (8, 1, {"base": 10.0}, [0.0] * 4),
        # Kimi K2's: both are the same index, 5.6, and the ramp is between the whole ones beside it.
        (16, 4096, {"base": 10000.0, "beta_fast": 1.0}, [0.0] * 6 + [1.0] * 2),
    ],
    ids=["end beyond the frequencies", "begin behind the end", "end before the begin", "one index"],
)
def test_yarns_ramp_at_its_bounds(d: int, length: int, options: dict[str, Any], shares: list[float]) -> None:
    """As in transformers' ``_compute_yarn_parameters``: indices are bound to 0 and to the head size less 1."""
    base = options.pop("base")
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=length, **options)
    plain = base ** (-2 * np.arange(d // 2) / d)
    expected = [w * (1 - t) + w / 4.0 * t for w, t in zip(plain, np.clip(shares, 0.0, 1.0), strict=True)]
    np.testing.assert_allclose(frequencies(scaling, d, base)[0], expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LinearScaling(factor=0.5), "factor must be >= 1, got 0.5"),
        (lambda: Llama3Scaling(low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor must be > 0 and below"),
        (lambda: Llama3Scaling(original_max_position_embeddings=0), "original_max_position_embeddings must be an int"),
        (lambda: YarnScaling(factor=2.0, beta_fast=0.5), "must be > 0 and at most beta_fast, got 1.0 and 0.5"),
        (lambda: rotary_embedding(jnp.arange(2), D, 1.0, scaling=YarnScaling(factor=2.0)), "YaRN needs .* base > 1"),
        (lambda: rotary_embedding(jnp.arange(2), D, rotary_percent=1.5), r"rotary_percent must be in \(0, 1\]"),
        (lambda: rotary_embedding(jnp.arange(2), D, rotary_percent=0.4), r"got 3 \(rotary_percent 0.4 of 8\); change"),
    ],
)
def test_bad_numbers_say_what_is_allowed(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_sizes_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="needs an even head size, got 5"):
        rotary_embedding(jnp.arange(4), 5)
    with pytest.raises(ValueError, match="base must be > 0"):
        rotary_embedding(jnp.arange(4), D, 0.0)
    with pytest.raises(ValueError, match=r"rotary embedding of head size 8 for x of shape \(1, 4, 1, 16\)"):
        apply_rotary(draw("x", (1, 4, 1, 16)), rotary_embedding(jnp.arange(4), D))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_positions_below_zero_turn_the_other_way(dtype):
    """There is no table that would bound positions: angles are computed from each."""
    x, positions = draw("x", (1, 5, 2, 8)), np.array([-128, -3, 0, 3, 127])
    frequency = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    angle = (positions[:, None] * frequency)[None, :, None]
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    want = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    got = apply_rotary(x, rotary_embedding(jnp.asarray(positions, dtype), 8))
    # An angle of 128 has an error of 2^-18 in fp32.
    np.testing.assert_allclose(got, np.concatenate(want, axis=-1), rtol=0, atol=2.0**-17 * np.abs(x).max())


@pytest.mark.parametrize("positions", [(1,), (3,), (1, 1), (2, 1), (3, 4), (1, 2, 4)])
def test_angles_of_other_positions_are_refused(positions):
    """Broadcasting would turn all positions by one's angle."""
    angles = rotary_embedding(jnp.zeros(positions, jnp.int32), 8)
    with pytest.raises(ValueError, match=r"its positions must be \[s\] or \[b, s\]"):
        apply_rotary(draw("x", (2, 4, 1, 8)), angles)


def test_positions_are_integers():
    with pytest.raises(TypeError, match="positions must be integers, got bfloat16"):
        rotary_embedding(jnp.arange(300, dtype=jnp.bfloat16), 8)
