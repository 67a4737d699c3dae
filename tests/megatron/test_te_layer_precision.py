"""A layer's own precision: from the configuration's rules by its name, from `finish_init`, and what it then runs."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import Linear
from jax_te.megatron import (
    MatchContext,
    QuantizationConfig,
    RecipeConfig,
    TEColumnParallelLinear,
    TEDelayedScaling,
    TELayerNormColumnParallelLinear,
    TEQuantizationRecipe,
    TERowParallelLinear,
    recipe_from_config,
)
from jax_te.quantize import TensorQuantizer, precision_of
from jax_te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
)
from tests.support.numerics import assert_bitwise, draw

H = 32
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4}
E4M3 = Float8CurrentScaling(fp8_format=Format.E4M3)


def payload(training: dict[str, Any]) -> dict[str, Any]:
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}


BF16 = payload({})
FP8 = payload({"fp8_quantization_recipe": "tensorwise", "override_nonquantized_autocast": True})
RULES = RecipeConfig.from_config_dict(
    {
        "configs": {"bf16": BF16, "fp8": FP8},
        "matchers": {
            "fc2": {"enabled": True, "type": "glob", "pattern": "*.linear_fc2", "config": "bf16"},
            "mlp": {"enabled": True, "type": "glob", "pattern": "*.mlp.*", "config": "fp8"},
        },
    }
)


def build(kind: Any, **options: Any) -> Any:
    config = TransformerConfig(**SIZES, quant_recipe=RULES)
    split = {"input_is_parallel": True} if kind is TERowParallelLinear else {"gather_output": False}
    common = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
    return kind(H, H, **split, **common, is_expert=False, rngs=nnx.Rngs(0), **options)


def run(layer: Any, recipe: Recipe | None) -> jax.Array:
    with autocast(recipe):
        return layer(draw("x", (2, 8, H)))[0]


@pytest.mark.costly("TEColumnParallelLinear", slow=("TELayerNormColumnParallelLinear",))
@pytest.mark.parametrize("kind", [TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear])
def test_finish_init_changes_what_a_layer_runs(kind: Any):
    layer = build(kind)
    exact, quantized = run(layer, None), run(layer, E4M3)
    assert (exact != quantized).any()
    for config, ambient, expected in (
        (BF16, Float8BlockScaling(), exact),
        (FP8, None, quantized),
        (FP8, Float8BlockScaling(), quantized),
    ):
        layer.finish_init(QuantizationConfig(config, MatchContext("fc1"), "mine"))
        assert layer.will_execute_quantized(ambient is not None) == (expected is quantized)
        assert_bitwise(run(layer, ambient), expected)
    layer.finish_init(None)
    assert_bitwise(run(layer, E4M3), quantized)
    assert_bitwise(run(layer, None), exact)
    assert [layer.will_execute_quantized(flag) for flag in (True, False)] == [True, False]


def test_a_name_asks_the_configurations_rules():
    recipe = {
        name: getattr(build(TEColumnParallelLinear, name=name).module_recipe, "training", "ambient")
        for name in ("decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2", "decoder.proj", None)
    }
    assert list(recipe.values()) == [E4M3, None, "ambient", "ambient"]
    row = build(TERowParallelLinear, name="decoder.layers.0.mlp.linear_fc2")
    assert_bitwise(run(row, E4M3), run(build(TERowParallelLinear), None))
    assert build(TELayerNormColumnParallelLinear, name="a.linear_fc2").module_recipe.training is None


def quantizer(role: str) -> TensorQuantizer:
    """The factory of a custom recipe."""
    return TensorQuantizer(dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"fp8_recipe": "mxfp8"}, None),
        (
            {"fp8": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 8, "fp8_amax_compute_algo": "max"},
            DelayedScaling(margin=1, amax_history_len=8, amax_compute_algo="max"),
        ),
        (
            {"fp8": "e4m3", "tp_only_amax_red": True, "fp8_wgrad": False},
            DelayedScaling(
                fp8_format=Format.E4M3,
                amax_history_len=1,
                amax_compute_algo="most_recent",
                tp_only_amax_red=True,
                override_linear_precision=(False, False, True),
            ),
        ),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, Float8CurrentScaling()),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, Float8BlockScaling()),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_wgrad": False},
            MXFP8BlockScaling(override_linear_precision=(False, False, True)),
        ),
        ({"fp4": "e2m1"}, NVFP4BlockScaling()),
        (
            {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": "builtins.repr"},
            CustomRecipe(qfactory=repr),
        ),
        (
            {"fp4": "e2m1", "fp4_recipe": "custom", "fp4_quantizer_factory": "builtins.repr"},
            CustomRecipe(qfactory=repr),
        ),
    ],
)
def test_the_recipe_of_a_configuration(fields: dict[str, Any], expected: Recipe | None):
    assert recipe_from_config(TransformerConfig(**SIZES, **fields)) == expected


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_sums_are_fast_in_all_gemms_by_default(name: str):
    """As in te.jax; te.pytorch's are precise in backward. Block scaling adds its partial sums in fp32 in any case."""
    precise = name in ("blockwise", "mxfp8")
    recipes = [recipe_from_config(TransformerConfig(**SIZES, fp8="e4m3", fp8_recipe=name))]
    if name == "delayed":
        recipes += [TEDelayedScaling(), TEDelayedScaling(None, Format.HYBRID)]
    else:  # a quantization file's
        recipes.append(TEQuantizationRecipe.parse_from_config({"fp8_quantization_recipe": name}).to_recipe())
    assert [precision_of(recipe).split_accumulator for recipe in recipes] == [(precise,) * 3] * len(recipes)
    backward = MMParams(use_split_accumulator=True)
    if name == "delayed":
        asked = TEDelayedScaling(None, fp8_gemm_dgrad=backward, fp8_gemm_wgrad=backward)
        assert precision_of(asked).split_accumulator == (False, True, True)


def test_a_factory_that_cannot_be_found():
    config = TransformerConfig(**SIZES, fp8="hybrid", fp8_recipe="custom", fp8_quantizer_factory="nowhere.to_be_found")
    with pytest.raises(ValueError, match="'nowhere'"):
        recipe_from_config(config)


def test_fp8_wgrad_false_keeps_weight_gradients_exact():
    """Megatron passes the flag on and Transformer Engine drops it."""
    config = TransformerConfig(**SIZES, fp8="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False)
    layer, x, g = Linear(H, H, False, rngs=nnx.Rngs(0)), draw("x", (16, H)), draw("g", (16, H))

    def gradients(recipe: Recipe | None) -> tuple[jax.Array, jax.Array]:
        with autocast(recipe):
            d_layer, dx = jax.vjp(lambda layer, x: layer(x), layer, x)[1](g)
        return d_layer.kernel[...], dx

    exact, with_wgrad, without = (
        gradients(recipe) for recipe in (None, Float8CurrentScaling(), recipe_from_config(config))
    )
    assert_bitwise(without[0], exact[0])
    assert_bitwise(without[1], with_wgrad[1])
    assert (with_wgrad[0] != exact[0]).any()
