"""The report of `quantize_model` says high of what its own recipe, or its user, keeps in high precision."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jax_te.linen as te
from jax_te.layers import Linear, keep_in_high_precision, quantize_model
from jax_te.recipe import Float8CurrentScaling, ModuleRecipe, autocast
from tests.support.numerics import without_type_checker

CURRENT = Float8CurrentScaling()
X = jax.random.normal(jax.random.key(0), (16, 32))
IN_EVALUATION = ModuleRecipe(training=None, evaluation=CURRENT)


def model() -> nnx.Sequential:
    return nnx.Sequential(*(nnx.Linear(32, 32, rngs=nnx.Rngs(seed)) for seed in range(3)))


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(32)(nn.Dense(32)(nn.Dense(32)(x)))


def test_a_rule_without_a_recipe_is_no_recipe() -> None:
    with autocast(CURRENT):
        made = model()
        report = quantize_model(made, X, rules={"layers.0": ModuleRecipe(training=None)})
        assert report.quantized == ("layers.1",)
        assert report.left["layers.0"] == "the rule 'layers.0' has no recipe"
        # The layer computes as Flax does.
        np.testing.assert_array_equal(made.layers[0](X), model().layers[0](X))
        with pytest.raises(ValueError, match="no recipe quantizes a layer of Sequential"):
            quantize_model(model(), X, rules={"*": ModuleRecipe(training=None)})


def test_a_rule_without_a_recipe_is_none_in_linen() -> None:
    with autocast(CURRENT):
        quantized = te.quantize_model(Plain(), X, rules={"Dense_0": ModuleRecipe(training=None)})
        assert te.quantization_report(quantized, X).quantized == ("Dense_1", "Dense_2")


def test_a_recipe_of_evaluation_alone_is_said() -> None:
    with autocast(CURRENT):
        made = model()
        report = quantize_model(made, X, rules={"layers.0": IN_EVALUATION})
        assert "by the rule 'layers.0'; in evaluation alone, high in training" in str(report)
        in_training = made(X)
        made.eval()
        assert np.any(np.asarray(made.layers[0](X)) != np.asarray(model().layers[0](X)))
        assert np.any(np.asarray(made(X)) != np.asarray(in_training))


def test_layers_of_jax_te_alike() -> None:
    made = nnx.Sequential(*(Linear(32, 32, rngs=nnx.Rngs(seed)) for seed in range(2)))
    with autocast(CURRENT):
        report = quantize_model(made, X, rules={"layers.0": ModuleRecipe(training=None)})
    assert report.left == {"layers.0": "the rule 'layers.0' has no recipe"}


def test_layers_that_were_kept_stay_so_and_are_reported() -> None:
    with autocast(CURRENT):
        made = model()
        quantize_model(made, X)
        keep_in_high_precision(made.layers[0])
        for rules in (None, {"layers.0": "ambient"}, None):
            report = quantize_model(made, X, rules=rules)
            assert report.left["layers.0"] == "it is kept in high precision"
            np.testing.assert_array_equal(made.layers[0](X), model().layers[0](X))
        assert "layers.0" in quantize_model(made, X, rules={"layers.0": CURRENT}).quantized
        assert np.any(np.asarray(made.layers[0](X)) != np.asarray(model().layers[0](X)))


def test_keeping_layers_that_follow_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no layer that follows recipes.* call keep_in_high_precision afterwards"):
        keep_in_high_precision(model())


def test_a_module_recipe_is_checked_where_it_is_set() -> None:
    layer = Linear(32, 32, rngs=nnx.Rngs(0))
    layer.module_recipe = CURRENT
    assert layer.module_recipe == ModuleRecipe(training=CURRENT, override_nonquantized_autocast=True)
    with autocast(CURRENT):
        expected = Linear(32, 32, rngs=nnx.Rngs(0))(X)
    np.testing.assert_array_equal(layer(X), expected)
    with without_type_checker(), pytest.raises(TypeError, match="expected a recipe or a ModuleRecipe"):
        layer.module_recipe = "current"  # type: ignore[assignment]
    assert layer.module_recipe is not None
