"""What reaches every family that is read: half precision, rules of `quantize_model`, and of a quantization file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.interop.huggingface import load_huggingface, save_huggingface
from jax_te.layers import dequantize_model, quantizable_modules, quantize_model
from jax_te.megatron import RecipeConfig, apply_quantization_config
from jax_te.models import BertModel, T5Model
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from tests.support.families import FAMILIES, family_model

CURRENT = Float8CurrentScaling()


def kernels_of(model: nnx.Module) -> set[str]:
    """Paths of modules with a kernel of a linear layer: those of routers and of a gate are in fp32 in any recipe."""
    paths = ("/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    found = {path.rpartition("/") for path in paths if path.endswith("kernel") and "/" in path}
    return {module.replace("/", ".") for module, _, name in found if name != "gate_kernel" and "router" not in module}


@pytest.mark.costly("BertForMaskedLM", slow=("T5ForConditionalGeneration",))
@pytest.mark.wide("GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM")
@pytest.mark.parametrize("name", FAMILIES)
def test_rules_reach_every_linear_layer(name: str) -> None:
    model = nnx.eval_shape(lambda: family_model(name))
    wanted = kernels_of(model)
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    rule = {"enabled": True, "type": "glob", "pattern": "*", "config": "bf16"}
    rules = RecipeConfig.from_config_dict({"configs": {"bf16": payload}, "matchers": {"all": rule}})
    of_file = apply_quantization_config(model, rules)
    assert {module.path for module in of_file.modules if module.config_key == "bf16"} >= wanted
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    arguments: Any = (tokens, tokens) if isinstance(model, T5Model) else (tokens,)
    # Rules of a call take the place of those of the file; the dense layer of BERT's head stays in high precision.
    report = quantize_model(model, *arguments, rules={"*proj": None, "*": "ambient"})
    left = {path for path in wanted if path.endswith("proj")} | ({"head_dense"} & wanted)
    # Layers of multi-token prediction run where there are labels, and this call has none.
    later = {path for path in wanted - left if path.startswith("mtp.")}
    assert {*report.quantized} == wanted - left - later
    assert all("in other calls by the rule '*'" in report.left[path] for path in later)
    assert left <= report.left.keys()
    assert ("head_dense" in left) == isinstance(model, BertModel)


@pytest.mark.costly("MT5ForConditionalGeneration", slow=("GemmaForCausalLM", "GptOssForCausalLM"))
@pytest.mark.wide("GemmaForCausalLM", "GptOssForCausalLM", "RobertaForMaskedLM", "MT5ForConditionalGeneration")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_in_half_precision_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    save_huggingface(family_model(name), tmp_path / "one", dtype=jnp.bfloat16)
    model = load_huggingface(tmp_path / "one")
    assert model.config.params_dtype == jnp.bfloat16
    save_huggingface(model, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_rule_gives_a_layer_its_recipe_and_no_rule_leaves_it() -> None:
    model = nnx.eval_shape(lambda: family_model("LlamaForCausalLM"))
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    layers = dict(quantizable_modules(model))
    rules = {"*.qkv": CURRENT, "layers.1.*": None, "nothing": None}
    with autocast(DelayedScaling()):
        with pytest.warns(UserWarning, match="rules that fit no layer: nothing"):
            report = quantize_model(model, tokens, rules=rules)
        found = {path: layer.recipe for path, layer in layers.items()}
    left = {path for path in layers if path.startswith("layers.1.") and not path.endswith("qkv")}
    assert {path: report.left.get(path) for path in left} == dict.fromkeys(left, "the rule 'layers.1.*'")
    assert {*report.quantized} == {*layers} - left
    for path, recipe in found.items():
        wanted = CURRENT if path.endswith("qkv") else None if path in left else DelayedScaling()
        assert recipe == wanted, path
    assert layers["layers.0.self_attention.qkv"].recipe == CURRENT  # also where nothing else is quantized
    dequantize_model(model)
    assert all(layer.recipe is None for layer in layers.values())
