"""Transformer Engine's GEMMs cannot be mapped: under ``jax.vmap`` its backend says so, and ``xla`` runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import value_and_grad
from jax_te.errors import BackendUnavailableError
from jax_te.layers import LayerNorm, LayerNormMLP, Linear
from jax_te.ops import activation, use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from tests.support.numerics import draw

X = draw("x", (4, 32, 64), jnp.bfloat16)
CALLS = {
    "Linear": lambda: Linear(64, 64, rngs=nnx.Rngs(0)),
    "LayerNormMLP": lambda: LayerNormMLP(64, 128, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("recipe", [None, DelayedScaling(amax_history_len=2), Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("build", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_backend_says_that_it_cannot_be_mapped(build, recipe, jitted):
    with autocast(recipe):
        call = build()
        mapped = jax.vmap(jax.jit(call) if jitted else call)
        with (
            use_backend("te"),
            pytest.raises(BackendUnavailableError, match=r"jax\.vmap maps over a call of 4 elements"),
        ):
            mapped(X)
        with use_backend("xla"):
            assert np.isfinite(mapped(X)).all()


def test_a_mapped_gradient_alone_says_so_too():
    layer = Linear(64, 64, rngs=nnx.Rngs(0))
    with use_backend("te"):
        _, backward = jax.vjp(layer, X[0])
        with pytest.raises(BackendUnavailableError, match=r"jax\.vmap"):
            jax.vmap(backward)(X)


def test_a_step_over_mapped_calls_runs_by_xla():
    with autocast(DelayedScaling(amax_history_len=2)), use_backend("xla"):
        layer = LayerNormMLP(64, 128, rngs=nnx.Rngs(0))
        loss, _ = value_and_grad(lambda layer: jnp.mean(jax.vmap(layer)(X).astype(jnp.float32) ** 2))(layer)
    assert np.isfinite(loss)


@pytest.mark.parametrize("call", [LayerNorm(64, rngs=nnx.Rngs(0)), lambda x: activation(x[..., None, :], "gelu")])
def test_norms_and_activations_are_mapped(call):
    with use_backend("te"):
        np.testing.assert_array_equal(jax.vmap(call)(X), call(X))
