"""Stacks made by ``nnx.vmap`` on ``te``: as one layer after the other, also with kernels quantized beforehand."""

import pytest
from flax import nnx

from jax_te.errors import BackendUnavailableError
from jax_te.layers import quantize_kernels, quantize_parameters, use_cached_kernels
from jax_te.ops import use_backend
from jax_te.recipe import autocast
from tests.layers.test_stacked import HIDDEN, RECIPES, Stack, side_by_side
from tests.support.numerics import TOLERANCE, assert_same_rounding, draw

pytestmark = pytest.mark.te


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_values_are_those_of_each_layer(recipe):
    with use_backend("te"), autocast(RECIPES[recipe]):
        alone, plain, cached, stored = (Stack(nnx.Rngs(0), stacked=i > 0) for i in range(4))
        use_cached_kernels(cached, quantize_kernels(cached))
        quantize_parameters(stored)
        x, call = draw("x", (4, 8, HIDDEN)), nnx.jit(Stack.__call__)
        expected = call(alone, x)
        for stack in (plain, cached, stored):
            assert_same_rounding(call(stack, x), expected, TOLERANCE["float32"])


def test_layers_side_by_side_are_refused():
    with use_backend("te"), autocast(RECIPES["delayed"]):
        stack = Stack(nnx.Rngs(0), stacked=True)
        with pytest.raises(BackendUnavailableError, match=r"jax\.vmap maps over a call"):
            side_by_side(stack, draw("x", (4, 8, HIDDEN)))
