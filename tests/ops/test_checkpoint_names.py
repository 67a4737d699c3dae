"""Policies by name reach every array that a quantizing kernel writes, so that none of them runs again."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear
from jax_te.recipe import autocast, recipe_from_name
from jax_te.remat import remat
from tests.support.numerics import equations
from tests.support.states import merging

LAYERS = {
    "linear": lambda: Linear(32, 64, rngs=nnx.Rngs(0)),
    "layernorm_linear": lambda: LayerNormLinear(32, 64, rngs=nnx.Rngs(0)),
    "layernorm_mlp": lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)),
}


def work(layer: nnx.Module, policy: str) -> Counter[str]:
    """How often the gradient quantizes, measures and normalizes."""
    x = jnp.ones((4, 8, 32), jnp.bfloat16)

    def loss(layer: Any) -> Any:
        return remat(lambda layer, x: layer(x), merging(layer), x, policy=policy).astype(jnp.float32).sum()

    counts: Counter[str] = Counter()
    for equation in equations(jax.make_jaxpr(jax.grad(loss))(layer).jaxpr):
        name = equation.primitive.name
        if name == "convert_element_type" and "float8" in str(equation.params["new_dtype"]):
            counts["quantize"] += 1
        elif name in ("reduce_max", "rsqrt"):
            counts[name] += 1
    return counts


@pytest.mark.costly("layernorm_mlp-current", slow=("layernorm_linear-delayed", "linear-block"))
@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_nothing_is_quantized_twice(layer: str, recipe: str) -> None:
    with autocast(recipe_from_name(recipe)):
        model = LAYERS[layer]()
        once, kept, again = (work(model, policy) for policy in ("none", "save_quantized", "full"))
    assert {name: kept[name] for name in ("quantize", "rsqrt")} == {name: once[name] for name in ("quantize", "rsqrt")}
    assert kept["reduce_max"] <= once["reduce_max"]  # fewer where checkpointing drops what nothing reads
    if recipe != "none":
        assert again["quantize"] > kept["quantize"]
        assert again["reduce_max"] > kept["reduce_max"]
    assert (again["rsqrt"] > once["rsqrt"]) == (layer != "linear")
