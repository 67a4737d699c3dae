"""`quantize_model` on a model that it has changed before, and refused calls of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.layers import DotProductAttention, Linear, quantize_model
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, ModuleRecipe, autocast
from jax_te.sharding import make_mesh

RECIPE, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
X = jax.random.normal(jax.random.key(0), (16, 32))


class Product(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), (32, 32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


MODELS = {
    "flax": (lambda: nnx.Linear(32, 32, rngs=nnx.Rngs(0)), ""),
    "jax_te": (lambda: Linear(32, 32, rngs=nnx.Rngs(0)), ""),
    "own": (Product, "w"),
}


@pytest.mark.costly("flax", slow=("jax_te",))
@pytest.mark.parametrize("kind", MODELS)
def test_a_recipe_then_the_ambient_one_then_no_rule(kind: str) -> None:
    make, path = MODELS[kind]
    model = make()
    plain = np.asarray(model(X))
    with autocast(RECIPE):
        reference = make()
        quantize_model(reference, X, rules={path: "ambient"})
        quantized = np.asarray(reference(X))
    assert (plain != quantized).any()

    def precision() -> str:
        (layer,) = [layer for layer in report.layers if layer.path == path]
        return layer.precision

    # The rule's recipe counts outside of a context, also if it is the ambient one where the rule is given.
    with autocast(RECIPE):
        quantize_model(model, X, rules={path: "ambient"})
        report = quantize_model(model, X, rules={path: RECIPE})
    assert precision() == f"by the rule {path!r}"
    np.testing.assert_array_equal(model(X), quantized)
    # Without a rule it stays, and the report says so.
    report = quantize_model(model, X)
    assert precision() == "its own recipe"
    np.testing.assert_array_equal(model(X), quantized)
    # The rule "ambient" takes it away, and a further call without rules changes nothing.
    quantize_model(model, X, rules={path: "ambient"})
    np.testing.assert_array_equal(model(X), plain)
    report = quantize_model(model, X)
    assert precision() == "the ambient recipe"
    np.testing.assert_array_equal(model(X), plain)
    with autocast(RECIPE):
        np.testing.assert_array_equal(model(X), quantized)


@pytest.mark.parametrize(
    ("module_recipe", "precision"),
    [
        (ModuleRecipe(training=RECIPE), "its own recipe"),
        (ModuleRecipe(training=None), "high: its own recipe"),
        (ModuleRecipe(training=None, override_quantized_autocast=False), "the ambient recipe"),
        (None, "the ambient recipe"),
    ],
)
def test_the_report_of_a_layer_with_a_recipe_of_its_own(module_recipe: Any, precision: str) -> None:
    model = nnx.Sequential(Linear(32, 32, rngs=nnx.Rngs(0)), Linear(32, 32, rngs=nnx.Rngs(1)))
    model.layers[0].module_recipe = module_recipe
    assert quantize_model(model, X).layers[0].precision == precision


def test_a_head_that_a_rule_has_quantized_stays_so_with_its_state() -> None:
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 16, rngs=nnx.Rngs(1)))
    with autocast(DELAYED):
        quantize_model(model, X, rules={"layers.1": "ambient"})
        model.layers[1].dot_general.quantizers["x"]["amax_history"][...] = jnp.array([3.0, 2.0])
        report = quantize_model(model, X)
        assert "layers.1" in report.quantized
        np.testing.assert_array_equal(model.layers[1].dot_general.quantizers["x"]["amax_history"][...], [3.0, 2.0])


def test_a_state_goes_on_under_a_rule_of_the_same_recipe() -> None:
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    with autocast(DELAYED):
        quantize_model(model, X)
        model.dot_general.quantizers["x"]["amax_history"][...] = jnp.array([3.0, 2.0])
        quantize_model(model, X, rules={"": DELAYED})
        np.testing.assert_array_equal(model.dot_general.quantizers["x"]["amax_history"][...], [3.0, 2.0])


class Attending(nnx.Module):
    def __init__(self) -> None:
        self.qkv = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.core = DotProductAttention(2, 16)
        self.out = nnx.Linear(32, 32, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        q = self.qkv(x).reshape(*x.shape[:2], 2, 16)
        return self.out(self.core(q, q, q).reshape(x.shape))


def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    model, x = Attending(), jnp.ones((2, 8, 32))
    before = nnx.split(model)
    refused = DelayedScaling(fp8_dpa=True, tp_only_amax_red=True)
    with (
        jax.set_mesh(make_mesh(ParallelConfig(data=2))),
        autocast(refused),
        pytest.raises(ValueError, match="tp_only_amax_red"),
    ):
        quantize_model(model, x)
    after = nnx.split(model)
    assert before[0] == after[0]
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])


def test_an_attribute_where_the_gemm_would_be_is_refused() -> None:
    model: Any = Product()
    model.w_gemm = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    layer = model.w_gemm
    with pytest.raises(ValueError, match="has an attribute 'w_gemm'"):
        quantize_model(model, X, rules={"w": RECIPE})
    assert model.w_gemm is layer
    assert type(model) is Product
