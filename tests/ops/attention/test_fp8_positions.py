"""Errors of FP8 attention by position: the chunked computation behind the table of docs/attention_fp8_errors.md."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import dot_product_attention
from jax_te.quantize import init_attention_state
from jax_te.recipe import DelayedScaling
from tests.support.fp8_attention_positions import (
    PLACES,
    RESULTS,
    ROLES,
    ROWS,
    SCALE,
    Results,
    compared,
    drawn,
    errors,
    in_fp8,
)
from tests.support.numerics import value_and_vjp

# Relative error, root mean square, of one rounding to E4M3, see test_fp8.py.
ROUNDING = 2.0**-4 / 3**0.5


@pytest.mark.costly
def test_it_computes_what_the_op_does():
    """At a length at which plain JAX has room for the scores, in a steady state."""
    recipe, operands = DelayedScaling(fp8_dpa=True, amax_history_len=1), drawn("peaked", 640)
    q, k, v, do = (jnp.asarray(x[None, :, None], jnp.bfloat16) for x in operands)
    state = init_attention_state(recipe)
    for _ in range(3):
        before = state
        out, (*gradients, state) = value_and_vjp(
            lambda q, k, v, state: dot_product_attention((q, k, v), recipe=recipe, state=state),
            (q, k, v, state),
            do,
            quick=True,
        )
    amaxes = {name: float(before[role]["amax_history"][0]) for role, names in ROLES.items() for name in names}
    chunked = in_fp8(operands, amaxes)
    op = Results(*(np.asarray(x, np.float32)[0, :, 0] for x in (out, *gradients)), amaxes={})
    # The op's results are rounded to bf16; a few codes lie between two values, see assert_same_codes.
    assert max(errors(op, chunked, PLACES["all"])) <= 2.0**-8


@pytest.mark.costly("2048-peaked")
@pytest.mark.parametrize("inputs", ["normal", "peaked"])
@pytest.mark.parametrize("length", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_errors_by_position(inputs, length):
    """Those of independent roundings, at each end of a sequence; those of bf16 are smaller by its five bits."""
    of_scores = score_variance(drawn(inputs, length))
    for place, pairs in compared(inputs, length).items():
        for name, (fp8, bf16) in zip(RESULTS, pairs, strict=True):
            own = 3 if name in ("out", "dv") else 8
            assert fp8 <= (own * ROUNDING**2 + 2 * of_scores) ** 0.5, (place, name)
            assert bf16 <= fp8 / 2**3, (place, name)  # bf16 does not round queries and keys, which they have been


def score_variance(operands: Any) -> float:
    """Mean square of a score's error from roundings of queries and keys, where probabilities are large.

    Errors of probabilities are those of scores times the probability, so their squares count by its square.
    """
    q, k = (x.astype(np.float64) for x in operands[:2])
    scores = q[-ROWS:] @ k.T * SCALE
    weights = np.exp(2 * (scores - scores.max(axis=1, keepdims=True)))
    weights /= weights.sum(axis=1, keepdims=True)
    square = np.square(q[-ROWS:]) @ np.square(k).T * SCALE**2
    return float(2 * ROUNDING**2 * np.mean(np.sum(weights * square, axis=1)))
