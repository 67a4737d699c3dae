"""Layers of Flax whose GEMMs run in Transformer Engine, as those of this package do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import Linear, quantize_model
from jax_te.ops import explain_backend, use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import value_and_grad

pytestmark = pytest.mark.te


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_a_quantized_layer_of_flax_is_the_layer_of_this_package(recipe):
    x = jax.random.normal(jax.random.key(0), (2, 32, 64))
    flax = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    with autocast(recipe), use_backend("te"):
        library = Linear(64, 64, bias=False, rngs=nnx.Rngs(0))
        library.kernel.set_value(flax.kernel.get_value())
        quantize_model(flax)
        assert explain_backend("dense", recipe=recipe).backend == "te"
        values = [nnx.jit(value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))(m, x) for m in (flax, library)]
    for one, other in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_array_equal(one, other)
