"""Mixtures of transformers: DeepSeek's layer of multi-token prediction, and tensors of two dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

_REASON = "compares with transformers: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

from jax_te.errors import CheckpointMismatchError  # noqa: E402
from jax_te.interop.huggingface import load_huggingface, save_huggingface  # noqa: E402
from jax_te.interop.huggingface.folder import open_tensors  # noqa: E402
from jax_te.training import create_train_state, make_train_step  # noqa: E402
from tests.interop.huggingface.test_block_scaled import in_fp8  # noqa: E402
from tests.interop.huggingface.test_parity import loaded, logits_of, make, tokens_of  # noqa: E402
from tests.support.numerics import assert_close  # noqa: E402

# Sizes that transformers cuts into blocks of 128, which must be whole there.
FP8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128} | {
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip


def depth_of(model: Any) -> Any:
    """A layer of multi-token prediction for a model, with random weights, made of transformers' own parts."""
    from transformers.modeling_layers import MtpLayer

    layer, norm = type(model.model.layers[-1]), type(model.model.norm)
    depth = MtpLayer(model.config, layer, norm, len(model.model.layers) - 1).eval()
    for parameter in depth.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    return depth


def published(depth: Any, number: int) -> dict[str, Any]:
    """Its tensors, under the names of DeepSeek's files."""
    found: dict[str, Any] = {}
    for name, tensor in depth.state_dict().items():
        name = name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            kinds, halves = ("gate_proj", "up_proj"), tensor.chunk(2, dim=1)
            each = [(i, kind, half[i]) for kind, half in zip(kinds, halves, strict=True) for i in range(len(tensor))]
            parts = {name.replace("gate_up_proj", f"{i}.{kind}.weight"): part for i, kind, part in each}
        elif name.endswith("experts.down_proj"):
            parts = {name.replace("down_proj", f"{i}.down_proj.weight"): part for i, part in enumerate(tensor)}
        found |= {f"model.layers.{number}.{key}": part.clone().contiguous() for key, part in parts.items()}
    return found


def test_the_layer_of_multi_token_prediction_is_read_and_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = make("deepseek v3", tmp_path)
    count = theirs.config.num_hidden_layers
    # As transformers saves it: the number of layers of prediction in config.json, and none of their tensors.
    assert loaded(tmp_path).mtp is None
    depth, tensors = depth_of(theirs), {}
    for path in tmp_path.glob("model*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    tensors |= published(depth, count)
    tensors[f"model.layers.{count}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.layers.{count}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    tokens = tokens_of(theirs, 13)
    with torch.no_grad():
        hidden = theirs.model(torch.tensor(tokens[:, :-2])).last_hidden_state
        embedded = theirs.model.embed_tokens(torch.tensor(tokens[:, 1:-1]))
        places = torch.arange(hidden.shape[1])[None]
        mask = torch.full((hidden.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        angles = theirs.model.rotary_emb(hidden, places)
        out = depth(embedded, hidden, angles, mask, places, None)
        logits = theirs.lm_head(out).flatten(0, 1)
        expected = float(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[:, 2:]).flatten()))

    model = load_huggingface(tmp_path)
    batch = jnp.asarray(tokens[:, :-1], jnp.int32), jnp.asarray(tokens[:, 1:], jnp.int32)
    state = create_train_state(lambda rngs: load_huggingface(tmp_path), optax.sgd(0.0), key=jax.random.key(0))
    step = make_train_step(lambda model, batch, key: model.loss(*batch), optax.sgd(0.0))
    metrics = step(state, batch)[1]
    assert float(metrics["mtp_1_loss"]) == pytest.approx(expected, rel=1e-5)

    save_huggingface(model, tmp_path / "back")
    found = open_tensors(tmp_path / "back")[0]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)
    back = type(theirs).from_pretrained(tmp_path / "back").eval()  # without the layer
    np.testing.assert_array_equal(logits_of(back, tokens), logits_of(theirs, tokens))
    without = load_huggingface(tmp_path, ignore_tensors=[f"model.layers.{count}"])
    assert without.mtp is None
    assert without.config.mtp_num_layers is None


def test_bf16_beside_a_bias_of_experts_in_fp32(tmp_path: Path) -> None:
    """As in DeepSeek-V3's files, whose router is in bf16, and not in transformers', which keeps that in fp32, too."""
    from safetensors.torch import load_file, save_file

    theirs = make("deepseek v3", tmp_path)
    tensors = {}
    for path in tmp_path.glob("model*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    bias = "e_score_correction_bias"
    tensors = {name: tensor if name.endswith(bias) else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_huggingface(tmp_path)
    assert model.config.params_dtype == jnp.bfloat16
    for dtype in (None, "bfloat16"):
        save_huggingface(model, tmp_path / "back", dtype=dtype)
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.bfloat16
    again = type(theirs).from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    tokens = tokens_of(theirs)
    wide = load_huggingface(tmp_path, dtype=jnp.float32)
    wide.eval()
    assert_close(wide(jnp.asarray(tokens, jnp.int32)), logits_of(again, tokens), 2.0**-18)


def test_experts_in_mxfp4_are_multiplied_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = make("gpt-oss", tmp_path, intermediate_size=64)
    tensors, experts = {}, {}
    for path in tmp_path.glob("model*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (count, outer, inner // 32), dtype=torch.uint8, generator=generator)
        experts[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
    choices: Any = (None, "keep")
    for choice in choices:
        with pytest.raises(ValueError, match="in MXFP4, whose values are read with block_scaled='dequantize'"):
            load_huggingface(tmp_path, block_scaled=choice)

    model = load_huggingface(tmp_path, block_scaled="dequantize")
    save_huggingface(model, tmp_path / "plain")
    found = open_tensors(tmp_path / "plain")[0]
    for name, expected in experts.items():
        np.testing.assert_array_equal(found[name], expected.numpy(), err_msg=name)
    back = type(theirs).from_pretrained(tmp_path / "plain").eval()
    tokens = tokens_of(theirs)
    model.eval()
    assert_close(model(jnp.asarray(tokens, jnp.int32)), logits_of(back, tokens), 2.0**-18)

    name = next(iter(experts))
    for lost, match in ((f"{name}_scales", "has no tensor _scales"), (f"{name}_blocks", "has no tensor _blocks")):
        with pytest.raises(CheckpointMismatchError, match=match):
            load_huggingface(tmp_path, block_scaled="dequantize", ignore_tensors=[lost])


def test_tensors_in_fp8_have_the_values_of_transformers(tmp_path: Path) -> None:
    """DeepSeek-V3's form as it is published, which transformers multiplies out on request, too."""
    theirs = make("deepseek v3", tmp_path, **FP8_SIZES)
    for path in tmp_path.glob("model*"):
        path.unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="1GB")
    in_fp8(tmp_path)
    expected = type(theirs).from_pretrained(
        tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    expected.eval()
    model = load_huggingface(tmp_path, block_scaled="dequantize", dtype=jnp.float32)
    save_huggingface(model, tmp_path / "plain")
    back = type(theirs).from_pretrained(tmp_path / "plain").eval()
    values, wanted = back.state_dict(), expected.state_dict()
    assert values.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []
    tokens = tokens_of(theirs)
    model.eval()
    assert_close(model(jnp.asarray(tokens, jnp.int32)), logits_of(expected, tokens), 2.0**-18)


def test_a_small_kimi_k2_is_read_and_written_as_deepseek_v3(tmp_path: Path) -> None:
    """Its folders name DeepSeek-V3's class, with a type and code of their own."""
    fields = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "n_shared_experts": 1}
    theirs = make("deepseek v3", tmp_path, **fields)
    config = tmp_path / "config.json"
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "kimi_k2", "auto_map": code}))
    model, tokens = loaded(tmp_path), tokens_of(theirs)
    assert_close(model(jnp.asarray(tokens, jnp.int32)), logits_of(theirs, tokens), 2.0**-18)
    save_huggingface(model, tmp_path / "back", like=tmp_path)
    back, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in back.state_dict().items())
    np.testing.assert_array_equal(logits_of(back.eval(), tokens), logits_of(theirs, tokens))
