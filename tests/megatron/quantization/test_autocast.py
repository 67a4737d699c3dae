"""Every row of the table in `jax_te.megatron.quantization.autocast`, in each of the four places that know it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import megatron
from jax_te.layers import LayerNormLinear, Linear, keep_in_high_precision
from jax_te.megatron import (
    MatchContext,
    QuantizationConfig,
    TEQuantizationParams,
    TEQuantizationRecipe,
    finish_init,
    get_fp8_autocast_for_quant_params,
    get_fp8_autocast_for_quant_recipe,
    get_should_context_be_quantized_params,
    get_should_context_be_quantized_recipe,
    set_save_original_input,
    will_execute_quantized,
)
from jax_te.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    NVFP4BlockScaling,
    Recipe,
    autocast,
    current_recipe,
)
from tests.support.numerics import assert_bitwise, draw, without_type_checker

AMBIENT, OWN_FP8, OWN_FP4 = DelayedScaling(), Float8CurrentScaling(fp8_format=Format.E4M3), NVFP4BlockScaling()
KINDS: dict[str, tuple[dict[str, str], Recipe | None]] = {
    "fp8": ({"fp8_quantization_recipe": "tensorwise"}, OWN_FP8),
    "fp4": ({"fp4_quantization_recipe": "nvfp4"}, OWN_FP4),
    "bf16": ({}, None),
}
# ambient quantized, kind of recipe, override_quantized, override_nonquantized (None: any) -> whose recipe runs
TABLE = [
    (True, "fp8 fp4", True, None, "own"),
    (True, "fp8 fp4", False, None, "ambient"),
    (True, "bf16", True, None, "own"),
    (True, "bf16", False, None, "ambient"),
    (False, "fp8 fp4", None, True, "own"),
    (False, "fp8 fp4", None, False, "ambient"),
    (False, "bf16", None, True, "own"),
    (False, "bf16", None, False, "ambient"),
]


def rows() -> list[tuple[bool, str, bool, bool, Recipe | None]]:
    """The table written out, with the recipe that runs."""
    result = []
    for quantized, kinds, on_quantized, on_nonquantized, whose in TABLE:
        firsts, seconds = ((True, False) if flag is None else (flag,) for flag in (on_quantized, on_nonquantized))
        for kind, first, second in itertools.product(kinds.split(), firsts, seconds):
            ambient = AMBIENT if quantized else None
            result.append((quantized, kind, first, second, KINDS[kind][1] if whose == "own" else ambient))
    return result


def recipe_config(kind: str, on_quantized: bool, on_nonquantized: bool) -> dict[str, Any]:
    flags = {"override_quantized_autocast": on_quantized, "override_nonquantized_autocast": on_nonquantized}
    return KINDS[kind][0] | flags


def config(training: dict[str, Any], **more: Any) -> QuantizationConfig:
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training, **more}
    return QuantizationConfig(payload, MatchContext("proj"), "mine")


def linear() -> Linear:
    return Linear(16, 32, rngs=nnx.Rngs(0))


def test_the_table_is_complete():
    combinations = {row[:4] for row in rows()}
    assert combinations == set(itertools.product((True, False), KINDS, (True, False), (True, False)))
    assert len(rows()) == len(combinations)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("quantized", "kind", "on_quantized", "on_nonquantized", "runs"), rows())
def test_every_row(
    quantized: bool, kind: str, on_quantized: bool, on_nonquantized: bool, runs: Recipe | None, training: bool
):
    mine = recipe_config(kind, on_quantized, on_nonquantized)
    # The other mode's recipe would give another result in nearly every row.
    other = recipe_config("fp4" if kind == "fp8" else "fp8", not on_quantized, not on_nonquantized)
    both = (mine, other) if training else (other, mine)
    recipe = TEQuantizationRecipe.parse_from_config(mine)
    params = TEQuantizationParams(*map(TEQuantizationRecipe.parse_from_config, both))
    ambient = AMBIENT if quantized else None
    with autocast(ambient):
        with get_fp8_autocast_for_quant_recipe(recipe):
            assert current_recipe() == runs
        with get_fp8_autocast_for_quant_params(params, training):
            assert current_recipe() == runs
        assert current_recipe() == ambient
    assert get_should_context_be_quantized_recipe(recipe, quantized) == (runs is not None)
    assert get_should_context_be_quantized_params(params, training, quantized) == (runs is not None)
    assert params.to_module_recipe().resolve(ambient, training=training) == runs
    # With the flags of one mode for both, and with one recipe for both.
    for evaluation in ({"evaluation_recipe": mine}, {}):
        layer = linear()
        finish_init(layer, config(mine, **evaluation))
        layer.train() if training else layer.eval()
        assert layer.module_recipe is not None
        assert layer.module_recipe.resolve(ambient, training=training) == runs
        assert will_execute_quantized(layer, quantized) == (runs is not None)
    layer = linear()
    finish_init(layer, config(both[0], evaluation_recipe=both[1]))
    layer.train() if training else layer.eval()
    assert will_execute_quantized(layer, quantized) == (runs is not None)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_no_params_change_nothing(quantized: bool, training: bool):
    ambient = AMBIENT if quantized else None
    with autocast(ambient), get_fp8_autocast_for_quant_params(None, training):
        assert current_recipe() == ambient
    assert get_should_context_be_quantized_params(None, training, quantized) == quantized
    layer = linear()
    layer.train() if training else layer.eval()
    assert will_execute_quantized(layer, quantized) == quantized
    keep_in_high_precision(layer)
    assert not will_execute_quantized(layer, quantized)


def test_bad_names_are_refused_where_the_recipe_takes_effect():
    recipe = TEQuantizationRecipe("tensor")
    with get_fp8_autocast_for_quant_recipe(recipe):
        assert current_recipe() is None
    with autocast(AMBIENT), pytest.raises(ValueError, match="FP8 recipe 'tensor'"):
        get_fp8_autocast_for_quant_recipe(recipe)


def test_megatrons_spellings():
    for name in (
        "get_fp8_autocast_for_quant_recipe",
        "get_fp8_autocast_for_quant_params",
        "get_should_context_be_quantized_recipe",
        "get_should_context_be_quantized_params",
    ):
        assert getattr(megatron, f"_{name}") is getattr(megatron, name)


def test_a_layer_computes_under_its_own_recipe():
    """What the table says holds for numbers: bitwise the result under the recipe that should run."""
    x = draw("x", (16, 16))

    @jax.jit
    def run(layer: Linear) -> jax.Array:
        return layer(x)

    def under(layer: Linear, ambient: Recipe | None) -> jax.Array:
        with autocast(ambient):
            return run(layer)

    hybrid = Float8CurrentScaling()
    plain = linear()
    exact, quantized = under(plain, None), under(plain, hybrid)
    assert (exact != quantized).any()
    own = linear()
    fp8 = KINDS["fp8"][0]
    finish_init(own, config(fp8, evaluation_recipe={}))
    own.train()
    assert_bitwise(under(own, hybrid), quantized)  # E4M3 forward in both
    assert_bitwise(under(own, None), exact)
    own.eval()
    assert_bitwise(under(own, hybrid), exact)
    finish_init(own, config(fp8 | {"override_nonquantized_autocast": True}))
    assert_bitwise(under(own, None), quantized)
    finish_init(own, None)
    assert_bitwise(under(own, None), exact)


def test_finish_init_overwrites_and_leaves_a_layer_alone_when_it_fails():
    layer = linear()
    finish_init(layer, config({"fp4_quantization_recipe": "nvfp4"}))
    before = layer.module_recipe
    with pytest.raises(ValueError, match="FP8 recipe 'fp8'"):
        finish_init(layer, config({"fp8_quantization_recipe": "fp8"}))
    assert layer.module_recipe == before is not None
    finish_init(layer, None)
    assert layer.module_recipe is None


@pytest.mark.parametrize("function", [lambda m: finish_init(m, None), lambda m: will_execute_quantized(m, True)])
def test_only_quantizable_layers(function: Any):
    with without_type_checker(), pytest.raises(TypeError, match=r"Linear.* Dropout"):
        function(nnx.Dropout(0.5))


def test_save_original_input():
    layer = linear()
    assert layer.save_original_input is False
    set_save_original_input(layer)
    assert layer.save_original_input is True
    for module in (LayerNormLinear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=f"{type(module).__name__}.* save_original_input"):
            set_save_original_input(module)


def test_saving_the_original_input_changes_no_value():
    x = draw("x", (16, 16))

    @jax.jit
    def gradients(layer: Linear, x: jax.Array) -> Any:
        return jax.grad(lambda layer, x: jnp.sum(layer(x) ** 2), argnums=(0, 1))(layer, x)

    kept = linear()
    set_save_original_input(kept)
    with autocast(Float8CurrentScaling()):
        leaves = (jax.tree.leaves(gradients(layer, x)) for layer in (linear(), kept))
        for plain, other in zip(*leaves, strict=True):
            assert_bitwise(other, plain)
