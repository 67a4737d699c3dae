"""A train step on the ``te`` backend: kernels quantized once a step and kernels held in FP8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import dense, quantize_kernel, use_backend
from jax_te.quantize import init_gemm_state
from jax_te.recipe import recipe_from_name
from tests.numerics import draw
from tests.training.test_kernels import run

pytestmark = pytest.mark.te


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_microbatches_and_fp8_parameters(name):
    recipe = recipe_from_name(name)
    with use_backend("te"):
        _, one = run(recipe)
        _, two = run(recipe, microbatches=2)
        np.testing.assert_allclose(one, two, rtol=0.02)  # current scaling: a scale for each microbatch
        if recipe is not None:
            _, held = run(recipe, microbatches=2, fp8_param=True)
            assert held == two


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_kernel_quantized_ahead_gives_the_same_bits(name, portable):
    recipe = recipe_from_name(name)
    x, w, g = draw("x", (64, 96), jnp.bfloat16), draw("w", (96, 128), jnp.bfloat16), draw("g", (64, 128), jnp.bfloat16)

    def call(ahead):
        def fn(x, w, state):
            used, gradient = w, None
            if ahead:
                used = quantize_kernel(w, recipe=recipe, state=state, portable=portable, backend="te")
                gradient = w
            return dense(x, used, recipe=recipe, state=state, gradient=gradient, backend="te")

        y, vjp = jax.vjp(jax.jit(fn), x, w, init_gemm_state(recipe))
        return y, vjp(g)

    for one, other in zip(jax.tree.leaves(call(False)), jax.tree.leaves(call(True)), strict=True):
        np.testing.assert_array_equal(one, other)
