"""An overflow of fp16 reaches the output or the gradients under every recipe, where loss scaling looks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import dense
from jax_te.recipe import Float8CurrentScaling
from tests.support.overflow import OVERFLOW_CASES, check_overflow_is_seen


@pytest.mark.costly(
    "layernorm_linear-the output's gradient-nvfp4",
    slow=(
        "layernorm_mlp-the first GEMM's output-block",
        "layernorm_linear-the output's gradient-delayed",
        "layernorm_mlp-a kernel-current",
        "linear-the input-mxfp8",
    ),
)
@pytest.mark.wide
@pytest.mark.parametrize(("layer", "overflow", "recipe"), OVERFLOW_CASES)
def test_it_is_seen(layer, overflow, recipe):
    check_overflow_is_seen(layer, overflow, recipe)


@pytest.mark.costly("input-1.0")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("where", ["input", "kernel", "gradient"])
def test_positive_and_negative_ones(where, sign):
    """Also a negative overflow of one operand alone."""
    arrays = {name: jnp.ones((32, 32), jnp.float16) for name in ("input", "kernel", "gradient")}
    arrays[where] = arrays[where].at[3, 5].set(sign * jnp.inf)
    call = lambda x, kernel: dense(x, kernel, recipe=Float8CurrentScaling())  # noqa: E731
    y, backward = jax.vjp(call, arrays["input"], arrays["kernel"])
    results = (y, *backward(arrays["gradient"]))
    assert any(bool(jnp.isnan(result).any()) for result in results)
