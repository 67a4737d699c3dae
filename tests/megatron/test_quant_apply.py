"""Quantization files on models: which layer gets what, what it computes, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import Linear, quantizable_modules
from jax_te.megatron import (
    Float16Module,
    GlobMatcher,
    RecipeConfig,
    apply_quantization_config,
    load_quantization_recipe,
)
from jax_te.models import GPTModel
from jax_te.recipe import Float8CurrentScaling, Format, ModuleRecipe, autocast
from tests.megatron.test_float16 import BF16
from tests.megatron.test_quant_config import EXAMPLE
from tests.support.numerics import assert_bitwise

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2)
PATHS = [
    f"layers.{i}.{name}" for i in range(2) for name in ("layernorm_mlp", "self_attention.proj", "self_attention.qkv")
]
FP8 = ModuleRecipe(training=Float8CurrentScaling(fp8_format=Format.E4M3), evaluation=None)
BF16_ONLY = ModuleRecipe(training=None)
TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)


def gpt(num_layers: int = 2) -> GPTModel:
    config = TransformerConfig(num_layers=num_layers, hidden_size=32, num_attention_heads=2)
    return GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=nnx.Rngs(0))


def load(folder: Path, text: str = EXAMPLE) -> RecipeConfig:
    (folder / "quant.yaml").write_text(text)
    return load_quantization_recipe(folder / "quant.yaml")


def recipes(model: nnx.Module) -> dict[str, Any]:
    return {path: layer.module_recipe for path, layer in quantizable_modules(model)}


@jax.jit
def logits(model: GPTModel) -> jax.Array:
    return model(TOKENS)


def test_the_example_on_a_gpt(tmp_path: Path):
    """Megatron's ``*fc2`` fits nothing here, where LayerNormMLP holds both GEMMs; the report says so."""
    model = gpt()
    report = apply_quantization_config(model, load(tmp_path))
    assert recipes(model) == dict.fromkeys(PATHS, FP8)
    assert [(m.path, m.matcher, m.config_key, m.module_recipe) for m in report.modules] == [
        (path, "rest", "fp8cs", FP8) for path in PATHS
    ]
    assert [m.kind for m in report.modules] == ["LayerNormMLP", "Linear", "LayerNormLinear"] * 2
    assert report.unused_matchers == ("out_hp",)
    assert report.unused_configs == ("bf16",)
    assert (report.shadowed_matchers, report.disabled_matchers, report.ambient) == ((), (), ())


def test_what_the_example_computes(tmp_path: Path):
    plain, model = gpt(), gpt()
    apply_quantization_config(model, load(tmp_path))
    with autocast(Float8CurrentScaling(fp8_format=Format.E4M3)):
        quantized = logits(plain)
    exact = logits(plain)
    assert (exact != quantized).any()
    model.train()
    assert_bitwise(logits(model), exact, what="no ambient recipe")
    with autocast(Float8CurrentScaling()):
        assert_bitwise(logits(model), quantized, what="the layers' own recipe in training")
        model.eval()
        assert_bitwise(logits(model), exact, what="high precision in evaluation")
        apply_quantization_config(model, None)
        assert (logits(model) != exact).any(), "the ambient recipe again"


def test_one_layer_in_high_precision(tmp_path: Path):
    model = gpt()
    report = apply_quantization_config(model, load(tmp_path, EXAMPLE.replace("*fc2", "layers.1.*")))
    assert recipes(model) == {path: BF16_ONLY if path.startswith("layers.1.") else FP8 for path in PATHS}
    assert (report.unused_matchers, report.unused_configs) == ((), ())
    with autocast(Float8CurrentScaling()):
        products = [line for line in logits.lower(model).as_text().splitlines() if "dot_general" in line]
    assert sum("f8E4M3FN" in line for line in products) == 4, "layer 0's forward GEMMs; layer 1 has none"


def test_report_as_text():
    rules = [
        GlobMatcher("*proj", "bf16", "proj"),
        GlobMatcher("*.0.*proj", "fp8", "behind"),
        GlobMatcher("*.layernorm_mlp", "fp8"),
        GlobMatcher("*linear_fc2", "bf16", "megatron's name"),
    ]
    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    fp8 = {"fp8_quantization_recipe": "blockwise", "override_nonquantized_autocast": True}
    configs = {
        "bf16": kind | {"training_recipe": {}},
        "fp8": kind | {"training_recipe": fp8, "evaluation_recipe": {}},
        "fp4": kind | {"training_recipe": {"fp4_quantization_recipe": "nvfp4"}},
    }
    report = apply_quantization_config(gpt(), RecipeConfig(rules, configs, disabled=["off"]))
    assert str(report).splitlines() == [
        "module                        class            matcher                                config"
        "  training        evaluation      acts where",
        "----------------------------  ---------------  -------------------------------------  ------"
        "  --------------  --------------  ----------------------",
        *(
            line
            for i in range(2)
            for line in (
                f"layers.{i}.layernorm_mlp        LayerNormMLP     GlobMatcher('*.layernorm_mlp', 'fp8')  fp8   "
                "  block           high precision  everywhere / quantized",
                f"layers.{i}.self_attention.proj  Linear           proj                                   bf16  "
                "  high precision  high precision  quantized",
                f"layers.{i}.self_attention.qkv   LayerNormLinear  -                                      -     "
                "  ambient         ambient         -",
            )
        ),
        "matchers that fit no layer: megatron's name",
        "matchers behind an earlier one: behind",
        "matchers not enabled: off",
        "configs that no layer got: fp4",
        "layers left to the ambient recipe: layers.0.self_attention.qkv, layers.1.self_attention.qkv",
    ]


def test_layers_without_a_rule_lose_what_they_had(tmp_path: Path):
    model = gpt()
    apply_quantization_config(model, load(tmp_path))
    report = apply_quantization_config(model, load(tmp_path, EXAMPLE.replace('"*"', '"layers.0.*"')))
    assert report.ambient == tuple(path for path in PATHS if path.startswith("layers.1."))
    assert recipes(model) == {path: FP8 if path.startswith("layers.0.") else None for path in PATHS}
    assert apply_quantization_config(model, None).ambient == tuple(PATHS)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (EXAMPLE.replace("config: fp8cs", "config: fp8"), KeyError, "config 'fp8'.*'configs'"),
        (EXAMPLE.replace("tensorwise", "tensor"), ValueError, "FP8 recipe 'tensor'"),
        (EXAMPLE.replace(", evaluation_recipe: {}", ", eval: {}"), AssertionError, "keys 'eval'"),
        (EXAMPLE.replace("evaluation_recipe: {}", "evaluation_recipe:"), TypeError, "evaluation_recipe"),
    ],
)
def test_a_bad_file_changes_no_layer(tmp_path: Path, text: str, error: type[Exception], message: str):
    model = gpt()
    apply_quantization_config(model, load(tmp_path))
    assert text != EXAMPLE
    bad = load(tmp_path, text.replace('"*fc2"', '"*mlp"'))  # the first layer in order has a good config
    with pytest.raises(error, match=message):
        apply_quantization_config(model, bad)
    assert recipes(model) == dict.fromkeys(PATHS, FP8)


def test_layers_are_reported_in_their_order():
    report = apply_quantization_config(gpt(num_layers=11), None)
    assert [module.path.split(".")[1] for module in report.modules] == [str(i) for i in range(11) for _ in range(3)]


def test_a_float16_module_adds_nothing_to_the_paths(tmp_path: Path):
    model = Float16Module(BF16, gpt())
    report = apply_quantization_config(model, load(tmp_path))
    assert [module.path for module in report.modules] == PATHS
    assert recipes(model.module) == dict.fromkeys(PATHS, FP8)


def test_a_single_layer_has_an_empty_path():
    report = apply_quantization_config(Linear(16, 16, rngs=nnx.Rngs(0)), None)
    assert [module.path for module in report.modules] == [""]


def test_a_model_without_quantizable_layers():
    with pytest.raises(ValueError, match=r"Dropout.* Linear, LayerNormLinear"):
        apply_quantization_config(nnx.Dropout(0.5), RecipeConfig([], {}))
