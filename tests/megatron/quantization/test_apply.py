"""Quantization files on models: which layer gets what, what it computes, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import (
    LayerNormMLP,
    Linear,
    TransformerLayer,
    prepare_quantization,
    quantizable_modules,
    quantize_parameters,
)
from jax_te.megatron import (
    Float16Module,
    GlobMatcher,
    RecipeConfig,
    apply_quantization_config,
    load_quantization_recipe,
)
from jax_te.megatron.quantization.gemm_paths import megatron_path
from jax_te.models import Execution, GPTModel
from jax_te.ops import activation, layernorm
from jax_te.quantize import QuantizedKernel
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format, ModuleRecipe, autocast
from tests.megatron.quantization.test_rules import EXAMPLE
from tests.megatron.test_float16 import BF16
from tests.support.numerics import NO_DROPOUT, assert_bitwise, assert_close, draw, quick_jit, relative_l2

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2)
PATHS = [
    f"layers.{i}.{name}" for i in range(2) for name in ("layernorm_mlp", "self_attention.proj", "self_attention.qkv")
]
FP8 = ModuleRecipe(training=Float8CurrentScaling(fp8_format=Format.E4M3), evaluation=None)
BF16_ONLY = ModuleRecipe(training=None)
DELAYED = DelayedScaling(amax_history_len=2)
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
    """Megatron's ``*fc2`` is the second kernel of a LayerNormMLP."""
    model = gpt()
    report = apply_quantization_config(model, load(tmp_path))
    assert recipes(model) == dict.fromkeys(PATHS, FP8)
    for i in range(2):
        mlp: Any = model.layers[i].layernorm_mlp
        assert mlp.kernel_recipes == (("wo_kernel", BF16_ONLY),)
    found = {m.path: (m.kind, m.matcher, m.config_key, m.module_recipe) for m in report.modules}
    assert len(found) == 8
    assert found["layers.1.layernorm_mlp.wi_kernel"] == ("LayerNormMLP", "rest", "fp8cs", FP8)
    assert found["layers.1.layernorm_mlp.wo_kernel"] == ("LayerNormMLP", "out_hp", "bf16", BF16_ONLY)
    assert found["layers.1.self_attention.qkv"] == ("LayerNormLinear", "rest", "fp8cs", FP8)
    assert (report.unused_matchers, report.unused_configs) == ((), ())
    assert (report.shadowed_matchers, report.disabled_matchers, report.ambient) == ((), (), ())
    apply_quantization_config(model, None)
    assert model.layers[0].layernorm_mlp.kernel_recipes == ()


def test_megatrons_names_and_the_packages_mean_the_same():
    """Each rule reaches one GEMM: of a GPT, of both stacks of a T5, of a layer alone."""
    kind = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}

    def reached(model: nnx.Module, *patterns: str) -> list[str]:
        rules = [GlobMatcher(pattern, "bf16", pattern) for pattern in patterns]
        report = apply_quantization_config(model, RecipeConfig(rules, {"bf16": kind}))
        assert report.unused_matchers == ()
        return [m.path for m in report.modules if m.matcher is not None]

    model = gpt()
    assert reached(model, "decoder.layers.0.self_attention.linear_qkv") == ["layers.0.self_attention.qkv"]
    proj = [f"layers.{i}.self_attention.proj" for i in range(2)]
    assert reached(model, "decoder.layers.*.self_attention.linear_proj") == proj == reached(model, "*proj")
    fc1 = [f"layers.{i}.layernorm_mlp.wi_kernel" for i in range(2)]
    assert reached(model, "decoder.layers.*.mlp.linear_fc1") == fc1 == reached(model, "*.wi_kernel")
    assert reached(model, "decoder.layers.1.mlp.linear_fc2") == ["layers.1.layernorm_mlp.wo_kernel"]
    # One layer, not two kernels, where the same rule reaches both.
    assert reached(model, "*.mlp.linear_fc?") == ["layers.0.layernorm_mlp", "layers.1.layernorm_mlp"]
    layer = TransformerLayer(32, 64, 2, **NO_DROPOUT, layer_type="decoder", rngs=nnx.Rngs(0))
    assert reached(layer, "cross_attention.linear_q", "mlp.linear_fc2") == [
        "inter_attention.query",
        "layernorm_mlp.wo_kernel",
    ]
    assert megatron_path("encoder_layers.3.self_attention.proj") == "encoder.layers.3.self_attention.linear_proj"
    assert megatron_path("decoder_layers.0.inter_attention.key_value") == "decoder.layers.0.cross_attention.linear_kv"


@pytest.mark.slow
def test_rules_hold_in_a_scanned_stack():
    """A layer with a rule of its own runs outside of the loop, which would have one recipe for all."""
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=2)
    kind = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    rules = RecipeConfig([GlobMatcher("layers.0.*", "bf16", "first")], {"bf16": kind})

    def run(scan: bool, rules: RecipeConfig | None) -> jax.Array:
        execution = Execution(scan_layers=scan)
        model = GPTModel(config, vocab_size=64, max_sequence_length=16, execution=execution, rngs=nnx.Rngs(0))
        apply_quantization_config(model, rules)
        with autocast(Float8CurrentScaling()):
            return quick_jit(lambda model: model(TOKENS))(model)

    by_rule = run(True, rules)
    assert_close(by_rule, run(False, rules), 2.0**-18)
    assert relative_l2(by_rule, run(False, None)) > 2.0**-12


def test_a_rule_that_matches_nothing_is_logged_once(caplog: pytest.LogCaptureFixture):
    rules = [GlobMatcher("*.fc", "bf16", "fc"), GlobMatcher("*qvk", "bf16", "qvk")]
    apply_quantization_config(gpt(1), RecipeConfig(rules, {"bf16": {}}))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "rules fc, qvk" in record.getMessage()
    assert "layers.0.layernorm_mlp" in record.getMessage()
    assert "decoder.layers.0.self_attention.linear_qkv" in record.getMessage()


@pytest.mark.costly
def test_the_two_gemms_of_an_mlp_under_recipes_of_their_own():
    """Forward and gradients are those of the two layers one after the other, each under its recipe."""
    layer: Any = LayerNormMLP(32, 64, rngs=nnx.Rngs(0))
    layer.kernel_recipes = (("wo_kernel", BF16_ONLY),)
    x = draw("x", (16, 32))
    first = Linear(32, 64, rngs=nnx.Rngs(0))
    second = Linear(64, 32, rngs=nnx.Rngs(0))
    nnx.update(first, {"kernel": layer.wi_kernel.get_value()[:, 0], "bias": layer.wi_bias.get_value()[0]})
    nnx.update(second, {"kernel": layer.wo_kernel.get_value(), "bias": layer.wo_bias.get_value()})

    def apart(x: jax.Array) -> jax.Array:
        normed = layernorm(x, layer.scale.get_value(), layer.ln_bias.get_value())
        hidden = first(normed)
        with autocast(None):
            return second(activation(hidden[:, None], "gelu"))

    with autocast(Float8CurrentScaling()):
        assert_bitwise(layer(x), apart(x))
        assert_bitwise(jax.grad(lambda x: layer(x).sum())(x), jax.grad(lambda x: apart(x).sum())(x))
        text = jax.jit(lambda x: layer(x)).lower(x).as_text()
        kept = layer(x, is_first_microbatch=True)
        assert list(layer.kernel_cache.get_value()) == ["wi_kernel"]
        assert_bitwise(kept, layer(x))
    assert sum("dot_general" in line and "f8E4M3FN" in line for line in text.splitlines()) == 1
    prepare_quantization(layer, DELAYED)
    assert layer.quantizers_1 is not None
    assert jax.tree.leaves(nnx.as_pure(layer.quantizers_1))
    assert not jax.tree.leaves(nnx.as_pure(layer.quantizers_2))
    with autocast(Float8CurrentScaling()):
        quantize_parameters(layer)
    assert isinstance(layer.wi_kernel.get_value(), QuantizedKernel)
    assert not isinstance(layer.wo_kernel.get_value(), QuantizedKernel)


@pytest.mark.slow
def test_what_the_example_computes(tmp_path: Path):
    plain, model = gpt(), gpt()
    apply_quantization_config(model, load(tmp_path, EXAMPLE.replace("*fc2", "no such path")))
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
        GlobMatcher("*linear_fc3", "bf16", "megatron's name"),
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
        "  training        evaluation      active when",
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
        "rules that fit no layer: megatron's name",
        "rules behind an earlier one: behind",
        "rules not enabled: off",
        "configs that no layer got: fp4",
        "layers left to the ambient recipe: layers.0.self_attention.qkv, layers.1.self_attention.qkv",
    ]


def test_layers_without_a_rule_lose_what_they_had(tmp_path: Path):
    model = gpt()
    apply_quantization_config(model, load(tmp_path))
    report = apply_quantization_config(model, load(tmp_path, EXAMPLE.replace('"*"', '"layers.0.*"')))
    assert report.ambient == ("layers.1.layernorm_mlp.wi_kernel", *PATHS[4:])
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
    report = apply_quantization_config(model, load(tmp_path, EXAMPLE.replace("*fc2", "no such path")))
    assert [module.path for module in report.modules] == PATHS
    assert recipes(model.module) == dict.fromkeys(PATHS, FP8)


def test_a_single_layer_has_an_empty_path():
    report = apply_quantization_config(Linear(16, 16, rngs=nnx.Rngs(0)), None)
    assert [module.path for module in report.modules] == [""]


def test_a_model_without_quantizable_layers():
    with pytest.raises(ValueError, match=r"Dropout.* Linear, LayerNormLinear"):
        apply_quantization_config(nnx.Dropout(0.5), RecipeConfig([], {}))


@pytest.mark.parametrize("attribute", ["mlp", "feed_forward", "layernorm_mlp"])
def test_megatrons_names_reach_a_layernorm_mlp_under_any_name(attribute: str):
    model = nnx.Module()
    setattr(model, attribute, LayerNormMLP(16, 16, rngs=nnx.Rngs(0)))
    for pattern, kernel in (("*fc1", "wi_kernel"), ("*linear_fc2", "wo_kernel")):
        payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        rule = {"enabled": True, "type": "glob", "pattern": pattern, "config": "bf16"}
        rules = RecipeConfig.from_config_dict({"configs": {"bf16": payload}, "matchers": {"rule": rule}})
        report = apply_quantization_config(model, rules)
        assert not report.unused_matchers
        assert [each.path for each in report.modules if each.matcher == "rule"] == [f"{attribute}.{kernel}"]
