"""Activation functions of the user's own in the feed-forward block, the transformer layer and the models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import linen
from jax_te.config import TransformerConfig
from jax_te.layers import LayerNormMLP, TransformerLayer
from jax_te.models import GPTModel
from jax_te.recipe import autocast, recipe_from_name
from jax_te.sharding import constrain
from tests.support import reference
from tests.support.meshes import shard
from tests.support.numerics import NO_DROPOUT, TOLERANCE, assert_bitwise, assert_close, draw, quick_jit, value_and_vjp
from tests.support.reference import Form, parameters, randomize

B, S, H, F = 4, 8, 32, 64


def own(a: jax.Array) -> jax.Array:
    return jax.nn.silu(a)


def outputs(activation: Any, recipe: Any) -> Any:
    """Value, gradients and next states of the block; on the mesh that is set."""
    with autocast(recipe):
        layer = shard(randomize(LayerNormMLP(H, F, activation=activation, rngs=nnx.Rngs(0))))
        x = constrain(draw("x", (B, S, H)), ("batch", "sequence", "hidden"))
        g = constrain(draw("g", (B, S, H)), ("batch", "sequence", "hidden"))
        y, grads = value_and_vjp(lambda layer, x: layer(x), (layer, x), g, quick=True)
        return jax.tree.leaves((y, grads))


@pytest.mark.costly("current")
@pytest.mark.parametrize(
    "name", ["none", "current", *(pytest.param(name, marks=pytest.mark.slow) for name in ("block", "mxfp8", "nvfp4"))]
)
def test_a_function_gives_what_its_name_gives_under_every_recipe(name: str) -> None:
    recipe = None if name == "none" else recipe_from_name(name)
    for actual, expected in zip(outputs((own, "linear"), recipe), outputs("swiglu", recipe), strict=True):
        assert_bitwise(actual, expected)


@pytest.mark.costly("explicit", slow=["auto"])
def test_on_every_mesh(mesh_mode: str) -> None:
    """Under delayed scaling, where kernels write what they activate quantized."""
    recipe = recipe_from_name("delayed")
    for actual, expected in zip(outputs((own, "linear"), recipe), outputs("swiglu", recipe), strict=True):
        assert_bitwise(actual, expected)


def test_a_layer_with_a_function_follows_the_formula() -> None:
    layer, x = (
        randomize(TransformerLayer(H, F, 4, **NO_DROPOUT, activation=jnp.tanh, rngs=nnx.Rngs(0))),
        draw("x", (B, S, H)),
    )
    p = jax.tree.map(np.float64, parameters(layer))
    expected = reference.layer(np, p, np.float64(x), Form(activation="tanh"))  # type: ignore[arg-type]
    assert_close(quick_jit(lambda layer, x: layer(x))(layer, x), expected, 4 * TOLERANCE["float32"])


def test_a_model_takes_megatrons_fields() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, activation_func=own, gated_linear_unit=True
    )
    model = GPTModel(config, vocab_size=64, max_sequence_length=S, rngs=nnx.Rngs(0))
    assert model.layers[0].layernorm_mlp.activation == (own, "linear")
    assert model.layers[0].layernorm_mlp.wi_kernel.shape == (H, 2, 4 * H)


def test_in_linen() -> None:
    x, key = draw("x", (B, H)), jax.random.key(0)
    layers = [linen.LayerNormMLP(H, F, activation=activation) for activation in ((own, "linear"), "swiglu")]
    variables = layers[0].init(key, x)
    y, expected = (quick_jit(layer.apply)(variables, x) for layer in layers)
    assert_bitwise(y, expected)


@pytest.mark.parametrize(
    "function", [jax.nn.softmax, jnp.cumsum, lambda x: x[..., :1], lambda x: x.sum(), lambda x: x / jnp.max(jnp.abs(x))]
)
def test_a_function_that_is_not_elementwise_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"is not elementwise: f\(\[a, b\]\) is not \[f\(a\), f\(b\)\]\. Devices"):
        nnx.eval_shape(lambda: LayerNormMLP(H, F, activation=("linear", function), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("function", [jnp.tanh, jnp.sign, jnp.log, lambda x: jnp.full_like(x, 2.0)])
def test_an_elementwise_function_is_taken_under_transformations_too(function: Any) -> None:
    layer = nnx.eval_shape(lambda: LayerNormMLP(H, F, activation=function, rngs=nnx.Rngs(0)))
    assert layer.wi_kernel.shape == (H, 1, F)
