"""Folders of models with experts, without transformers: fields of published ones, what is refused, what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, MLATransformerConfig, ParallelConfig, TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.huggingface import load_huggingface, load_peft, save_huggingface, save_peft
from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.huggingface.folder import open_tensors
from jax_te.interop.huggingface.safetensors import write_file
from jax_te.layers import LoRA, Router, YarnScaling
from jax_te.megatron import RecipeConfig, apply_quantization_config
from jax_te.models import GPTModel, RotaryPositions
from jax_te.recipe import Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from tests.interop.huggingface.test_block_scaled import in_fp8
from tests.support.numerics import assert_bitwise, quick_jit

BLOCK: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "normalization": "RMSNorm",
    "activation": "swiglu", "add_bias_linear": False, "num_moe_experts": 4, "moe_ffn_hidden_size": 16,
    "layernorm_epsilon": 1e-6,
}  # fmt: skip
LATENT = LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=16)
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)
V3: dict[str, Any] = {
    "latent_attention": LATENT, "softmax_scale": YARN.score_factor * LATENT.head_channels**-0.5,
    "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "mtp_num_layers": 1,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_query_groups": 2},
    "Qwen2MoeForCausalLM": {
        "moe_router_pre_softmax": True,
        "add_qkv_bias": True,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
    },
    "Qwen3MoeForCausalLM": {"qk_layernorm": True, "kv_channels": 16},
    "OlmoeForCausalLM": {"qk_layernorm": True, "qk_layernorm_across_heads": True, "num_query_groups": 2},
    "DeepseekV2ForCausalLM": {
        **{name: V3[name] for name in ("latent_attention", "softmax_scale", "moe_shared_expert_intermediate_size")},
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_group_score_topk": 1,
    },
    "DeepseekV3ForCausalLM": V3,
    "Glm4MoeForCausalLM": {
        **{name: value for name, value in V3.items() if name not in ("latent_attention", "softmax_scale")},
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    },
    "GptOssForCausalLM": {
        "add_bias_linear": True,
        "kv_channels": 16,
        "num_query_groups": 2,
        "softmax_type": "learnable",
        "activation": "qgeglu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "window_size": (4, 0),
        "window_attn_skip_freq": [1, 0],
    },
}


def model_of(name: str, **changes: Any) -> GPTModel:
    latent = name.startswith("Deepseek")
    model = GPTModel(
        TransformerConfig(**BLOCK | FORMS[name] | changes),
        vocab_size=80,
        max_sequence_length=32,
        position_embedding_type=RotaryPositions(scaling=YARN if latent else None, interleaved=latent),
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router) and module.expert_bias is not None:
            module.expert_bias.set_value(jnp.arange(4.0) / 8.0)
    return model


def arrays_of(model: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))


@pytest.mark.costly(
    "OlmoeForCausalLM",
    slow=(
        "Glm4MoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV2ForCausalLM",
        "MixtralForCausalLM",
        "Qwen3MoeForCausalLM",
    ),
)
@pytest.mark.parametrize("name", FORMS)
def test_a_model_is_what_was_written(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    save_huggingface(model, tmp_path, max_shard_size=20_000)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    back = load_huggingface(tmp_path)
    jax.tree.map(assert_bitwise, arrays_of(back), arrays_of(model))
    save_huggingface(back, tmp_path / "again", max_shard_size=20_000)
    for path in tmp_path.glob("*.*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_megatrons_configuration_of_latent_attention_is_deepseeks(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 16)
    others = {name: value for name, value in V3.items() if name not in ("latent_attention", "softmax_scale")}
    config = MLATransformerConfig(**BLOCK, **others, **sizes, qk_layernorm=True, mscale_all_dim=1.0)
    model = GPTModel(
        config,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )
    save_huggingface(model, tmp_path)
    back = load_huggingface(tmp_path)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    run = quick_jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(run(back, tokens), run(model, tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_devices_read_their_own_experts(tmp_path: Path) -> None:
    model = model_of("DeepseekV3ForCausalLM")
    save_huggingface(model, tmp_path)
    with jax.set_mesh(make_mesh(ParallelConfig(expert=4, fsdp=2), axis_type="explicit")):
        sharded = load_huggingface(tmp_path)
        kernel = sharded.layers[1].mlp.experts.linear_fc1.kernel.get_value()
        assert kernel.addressable_shards[0].data.shape[0] == 1
        save_huggingface(sharded, tmp_path / "back")
    jax.tree.map(assert_bitwise, arrays_of(load_huggingface(tmp_path / "back")), arrays_of(model))


def test_adapters_of_a_model_whose_routers_move_their_biases(tmp_path: Path) -> None:
    """A folder of adapters has no place for these: they must stay as they are."""
    model = model_of("DeepseekV3ForCausalLM")
    layer = model.layers[1]
    layer.self_attention.proj = LoRA(layer.self_attention.proj, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"changes the bias by which .*/mlp/router balances its load"):
        save_peft(model, tmp_path)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router):
            module.frozen = True
    save_peft(model, tmp_path)
    loaded = model_of("DeepseekV3ForCausalLM")
    load_peft(loaded, tmp_path)
    assert loaded.layers[1].mlp.router.frozen
    assert not any(module.has_moving_bias for _, module in nnx.iter_modules(loaded) if isinstance(module, Router))


@pytest.mark.parametrize("field", ["rope_interleave", "norm_topk_prob"])
def test_a_null_of_a_choice_is_false(field: str) -> None:
    """As in transformers, which knows the default of an absent field alone."""
    (_, absent), null = read_form(DEEPSEEK_V3, "config.json", range(1000)), DEEPSEEK_V3 | {field: None}
    if field == "norm_topk_prob":
        with pytest.raises(ValueError, match="norm_topk_prob is False"):
            read_form(null, "config.json", range(1000))
        return
    _, found = read_form(null, "config.json", range(1000))
    same = read_form(DEEPSEEK_V3 | {field: False}, "config.json", range(1000))
    assert found == same[1] != absent


@pytest.mark.costly
def test_sinks_of_a_half_precision_model_have_its_dtype(tmp_path: Path) -> None:
    """They are fp32 parameters here, whatever dtype the others have."""
    model = model_of("GptOssForCausalLM", params_dtype=jnp.bfloat16)
    save_huggingface(model, tmp_path)
    tensors = open_tensors(tmp_path)[0]
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(jnp.bfloat16)}
    back = load_huggingface(tmp_path)
    sinks = [each.layers[0].self_attention.core_attention.softmax_offset.get_value() for each in (back, model)]
    assert_bitwise(*sinks)
    save_huggingface(back, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


# --- fields of published folders

# Compared with copies of the published files: of Mixtral, Qwen3, DeepSeek-V3, Kimi-K2 and gpt-oss in the folder
# model_configs of github.com/ai-dynamo/aiconfigurator (095f58a), which has them unchanged. Of Qwen1.5-MoE, DeepSeek-V2
# and GLM-4.5-Air public programs quote these fields; of OLMoE and of GLM-4.5-Air's rope_theta no copy was found.

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 32768, "max_window_layers": 21,
    "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0,
    "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
    "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": DEEPSEEK_YARN, "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "seq_aux": True, "topk_group": 3, "topk_method": "group_limited_greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
_LOSSES = ("aux_loss_alpha", "seq_aux", "pretraining_tp")
DEEPSEEK_V3 = {
    **{name: value for name, value in DEEPSEEK_V2.items() if name not in _LOSSES},
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "max_position_embeddings": 131072,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840,
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
QWEN3_CODER = {
    **QWEN3, "hidden_size": 6144, "intermediate_size": 8192, "max_position_embeddings": 262144,
    "max_window_layers": 62, "moe_intermediate_size": 2560, "num_attention_heads": 96, "num_experts": 160,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "qkv_bias": False, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
}  # fmt: skip
GPT_OSS_120B = {
    **GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36,
    "num_local_experts": 128,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mixtral-8x7B": (MIXTRAL, {"moe_ffn_hidden_size": 14336, "moe_router_pre_softmax": False}),
    "Qwen3-30B-A3B": (QWEN3, {"num_moe_experts": 128, "qk_layernorm": True, "moe_router_pre_softmax": False}),
    "Qwen3-Coder-480B-A35B": (QWEN3_CODER, {"num_moe_experts": 160, "moe_shared_expert_intermediate_size": None}),
    "gpt-oss-120b": (GPT_OSS_120B, {"num_moe_experts": 128, "moe_ffn_hidden_size": 2880}),
    "Qwen1.5-MoE-A2.7B-Chat": (QWEN2, {"moe_shared_expert_gate": True, "moe_router_pre_softmax": True}),
    "OLMoE-1B-7B": (OLMOE, {"qk_layernorm_across_heads": True, "moe_ffn_hidden_size": 1024}),
    "DeepSeek-V2": (DEEPSEEK_V2, {"moe_router_group_score_topk": 1, "moe_shared_expert_intermediate_size": 3072}),
    "DeepSeek-V3": (DEEPSEEK_V3, {"mtp_num_layers": 1, "moe_layer_freq": (0,) * 3 + (1,) * 58}),
    "GLM-4.5-Air": (GLM, {"qk_layernorm": False, "add_qkv_bias": True, "mtp_num_layers": 1}),
    "gpt-oss-20b": (GPT_OSS, {"softmax_type": "learnable", "window_size": (127, 0), "moe_router_topk": 4}),
    "Kimi-K2": (KIMI_K2, {"moe_router_num_groups": None, "moe_router_topk_scaling_factor": 2.827}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    values, expected = PUBLISHED[name]
    _, form = read_form(values, "config.json", range(1000))
    assert {key: getattr(form.config, key) for key in expected} == expected


ONE_EXPERT = "num_experts_per_tok is 1; the weight of a token's only expert is then 1.*2 or more are read"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MIXTRAL | {"num_local_experts": 10**9}, "number of experts is 1000000000; there are 1000 tensors"),
        (
            MIXTRAL | {"num_experts_per_tok": 1},
            ONE_EXPERT,
        ),
        (QWEN3 | {"num_experts_per_tok": 1, "norm_topk_prob": True}, ONE_EXPERT),
        (OLMOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, ONE_EXPERT),
        (
            GPT_OSS | {"num_experts_per_tok": 1, "experts_per_token": 1},
            ONE_EXPERT,
        ),
        (MIXTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (QWEN3 | {"attention_bias": True}, "attention_bias is True"),
        (QWEN3 | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3 | {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        (QWEN3 | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
        (QWEN3 | {"use_qk_norm": False}, "use_qk_norm is False"),
        (QWEN2 | {"use_mrope": True}, "use_mrope is True"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (OLMOE | {"attention_bias": True}, "attention_bias is True"),
        (OLMOE | {"head_dim": 64}, "head_dim=64"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (DEEPSEEK_V2 | {"num_experts_per_tok": None}, "no field num_experts_per_tok"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (DEEPSEEK_V3 | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; the norms of latents have 1e-6"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias is True"),
        (DEEPSEEK_V3 | {"num_key_value_heads": 8}, "num_query_groups=8 is for multi-head attention"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000"),
        (DEEPSEEK_V3 | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.0}}, "mscale_all_dim is 1.0"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (GLM | {"mlp_bias": True}, "mlp_bias=True"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        (GPT_OSS | {"attention_bias": False}, "attention_bias is False"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (GPT_OSS | {"experts_per_token": 2}, "experts_per_token is 2"),
        (GPT_OSS | {"swiglu_limit": -1.0}, "activation_func_clamp_value"),
        (DEEPSEEK_V3 | {"index_topk": 2048}, "index_topk=2048"),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_would_change_numbers_are_refused_by_name(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_form(values, "config.json", range(1000))


@pytest.mark.costly(
    "DeepseekV3ForCausalLM-changes6-DeepseekV3ForCausalLM: [^;]*moe_layer_freq",
    "DeepseekV3ForCausalLM-changes4-moe_router_enable_expert_bias=False",
    "DeepseekV3ForCausalLM-changes5-no multiple of an expert's, 16",
    "DeepseekV3ForCausalLM-changes7-DeepseekV3ForCausalLM: softmax_scale=0.5",
    "DeepseekV2ForCausalLM-changes11-DeepseekV2ForCausalLM: mtp_num_layers=1",
    "Glm4MoeForCausalLM-changes8-no shared",
    slow=(
        "MixtralForCausalLM-changes12-match12",
        "GptOssForCausalLM-changes10-GptOssForCausalLM: [^;]*moe_layer_freq",
        "MixtralForCausalLM-changes1-MixtralForCausalLM: [^;]*moe_layer_freq=\\\\[True, False\\\\]",
        "MixtralForCausalLM-changes2-moe_expert_capacity_factor=1.0",
        "MixtralForCausalLM-changes0-MixtralForCausalLM: .*moe_router_pre_softmax=True",
        "Qwen2MoeForCausalLM-changes3-Qwen2MoeForCausalLM: moe_shared_expert_gate=False",
    ),
)
@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("MixtralForCausalLM", {"moe_router_pre_softmax": True}, "MixtralForCausalLM: .*moe_router_pre_softmax=True"),
        ("MixtralForCausalLM", {"moe_layer_freq": 2}, r"MixtralForCausalLM: [^;]*moe_layer_freq=\[True, False\]"),
        ("MixtralForCausalLM", {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
        ("Qwen2MoeForCausalLM", {"moe_shared_expert_gate": False}, "Qwen2MoeForCausalLM: moe_shared_expert_gate=False"),
        ("DeepseekV3ForCausalLM", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias=False"),
        ("DeepseekV3ForCausalLM", {"moe_shared_expert_intermediate_size": 24}, "no multiple of an expert's, 16"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": [1, 0]}, r"DeepseekV3ForCausalLM: [^;]*moe_layer_freq"),
        ("DeepseekV3ForCausalLM", {"softmax_scale": 0.5}, "DeepseekV3ForCausalLM: softmax_scale=0.5"),
        ("Glm4MoeForCausalLM", {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}, "no shared"),
        ("GptOssForCausalLM", {"glu_linear_offset": 0.0}, "GptOssForCausalLM: glu_linear_offset=0.0"),
        ("GptOssForCausalLM", {"moe_layer_freq": 2}, "GptOssForCausalLM: [^;]*moe_layer_freq"),
        ("DeepseekV2ForCausalLM", {"mtp_num_layers": 1}, "DeepseekV2ForCausalLM: mtp_num_layers=1"),
        (
            "MixtralForCausalLM",
            {"moe_router_topk": 1, "moe_router_pre_softmax": True},
            r"MixtralForCausalLM, GptOssForCausalLM: moe_router_topk=1: .* by the router's score \(.*'softmax', "
            r"moe_router_pre_softmax=True\).*save_megatron .* write the model as it is",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
            r"Qwen3MoeForCausalLM.*: moe_router_topk=1: .* by the router's score \(.*='sigmoid'",
        ),
    ],
)
def test_models_that_no_architecture_can_say_are_refused(
    name: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    model = nnx.eval_shape(lambda: model_of(name, **changes))
    with pytest.raises(ValueError, match=match):
        save_huggingface(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- tensors


@pytest.mark.slow
def test_the_layer_of_prediction_is_read_or_ignored_by_name(tmp_path: Path) -> None:
    model = model_of("DeepseekV3ForCausalLM")
    save_huggingface(model, tmp_path)
    tensors = open_tensors(tmp_path)[0]
    np.testing.assert_array_equal(tensors["model.layers.2.shared_head.head.weight"], tensors["lm_head.weight"])
    without = load_huggingface(tmp_path, ignore_tensors=["model.layers.2"])
    assert (model.mtp is None, without.mtp) == (False, None)
    run = quick_jit(lambda model, tokens: model(tokens))
    tokens = jnp.arange(16, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(run(without, tokens), run(model, tokens))
    with pytest.raises(ValueError, match=r"ignore_tensors names 'model\.layers\.7'"):
        load_huggingface(tmp_path, ignore_tensors=["model.layers.7"])
    with pytest.raises(CheckpointMismatchError, match=r"model\.norm\.weight is missing"):
        load_huggingface(tmp_path, ignore_tensors=["model.norm"])
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointMismatchError, match=r"model\.layers\.2\.\S+ is unexpected"):
        load_huggingface(tmp_path)


@pytest.mark.slow
def test_experts_in_fp8_are_multiplied_out(tmp_path: Path) -> None:
    """As DeepSeek-V3's files are published: kernels in E4M3, each with scales of its own."""
    sizes: dict[str, Any] = {"hidden_size": 160, "moe_ffn_hidden_size": 144, "moe_shared_expert_intermediate_size": 144}
    save_huggingface(model_of("DeepseekV3ForCausalLM", **sizes), tmp_path, dtype="bfloat16")
    stored = open_tensors(in_fp8(tmp_path))[0]
    plain = load_huggingface(tmp_path, block_scaled="dequantize", dtype=jnp.float32)
    save_huggingface(plain, tmp_path / "plain")
    found = open_tensors(tmp_path / "plain")[0]
    scaled = [name for name in found if f"{name}_scale_inv" in stored]
    assert {name.split(".")[-2] for name in scaled} >= {"gate_proj", "kv_b_proj", "kv_a_proj_with_mqa", "eh_proj"}
    for name in scaled:
        rows, columns = found[name].shape
        scale = stored[f"{name}_scale_inv"].repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
        np.testing.assert_array_equal(found[name], stored[name].astype(np.float32) * scale, err_msg=name)
    with (
        autocast(Float8BlockScaling(use_f32_scales=True)),
        pytest.raises(ValueError, match="kernels of experts are not kept in FP8"),
    ):
        load_huggingface(tmp_path, block_scaled="keep", dtype=jnp.bfloat16)


def test_missing_tensors_of_an_expert_are_named(tmp_path: Path) -> None:
    save_huggingface(model_of("MixtralForCausalLM"), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    with pytest.raises(CheckpointMismatchError) as error:
        load_huggingface(tmp_path, ignore_tensors=[name])
    assert str(error.value).splitlines()[1:] == [f"{name} is missing"]


# --- precision


@pytest.mark.slow
def test_recipes_and_rule_files_reach_experts_and_latents(tmp_path: Path) -> None:
    save_huggingface(model_of("DeepseekV3ForCausalLM"), tmp_path)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    run = quick_jit(lambda model, tokens: model(tokens))
    plain, logits = np.asarray(run(load_huggingface(tmp_path), tokens)), {}
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    with autocast(Float8CurrentScaling()):
        for left in ("experts.linear_fc*", "self_attention.*", "*"):
            model = load_huggingface(tmp_path)
            rule = {"enabled": True, "type": "glob", "pattern": f"*{left}", "config": "bf16"}
            rules = RecipeConfig.from_config_dict({"configs": {"bf16": payload}, "matchers": {"left": rule}})
            report = str(apply_quantization_config(model, rules))
            assert all(name in report for name in ("mlp.experts.linear_fc1", "self_attention.kv_up"))
            logits[left] = np.asarray(run(model, tokens))
    np.testing.assert_array_equal(logits.pop("*"), plain)
    for one in logits.values():
        assert not np.array_equal(one, plain)
    assert not np.array_equal(*logits.values())


def in_mxfp4(folder: Path, **changed: np.ndarray | None) -> Path:
    """A gpt-oss whose experts are in MXFP4, all of them 6 times 2**0; with other tensors of the first gates."""
    model = model_of("GptOssForCausalLM", num_layers=1, moe_ffn_hidden_size=32, window_attn_skip_freq=[1])
    save_huggingface(model, folder, dtype=jnp.bfloat16)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in open_tensors(folder)[0].items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.copy()
            continue
        experts, inner, outer = tensor.shape
        tensors[f"{name}_blocks"] = np.full((experts, outer, inner // 32, 16), 0x77, np.uint8)
        tensors[f"{name}_scales"] = np.full((experts, outer, inner // 32), 127, np.uint8)
    for end, tensor in changed.items():
        name = f"model.layers.0.mlp.experts.gate_up_proj_{end}"
        tensors |= {} if tensor is None else {name: tensor}
        if tensor is None:
            del tensors[name]
    plan = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_file(folder / "new", plan, tensors.items())
    (folder / "new").replace(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


@pytest.mark.slow
def test_tensors_in_mxfp4_that_stand_for_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model = load_huggingface(in_mxfp4(tmp_path / "good"), block_scaled="dequantize")
    assert bool((model.layers[0].mlp.experts.linear_fc1.kernel[...] == 6.0).all())
    data, scales = np.full((4, 64, 1, 16), 0x77, np.uint8), np.full((4, 64, 1), 127, np.uint8)
    for number, (changed, match) in enumerate(
        [
            ({"scales": None}, f"{name} has no tensor _scales"),
            ({"blocks": None}, f"{name} has no tensor _blocks"),
            ({"blocks": data.reshape(4, 64, 2, 8)}, rf"{name} is \[4, 64, 2, 8\] with scales \[4, 64, 1\]"),
            ({"scales": scales[:, :32]}, rf"{name} is \[4, 64, 1, 16\] with scales \[4, 32, 1\]"),
            ({"scales": scales.astype(np.int8)}, f"{name} is of uint8 with scales of int8"),
            ({"blocks": data[:, :32], "scales": scales[:, :32]}, rf"{name} is \[4, 32, 32\] and must be \[4, 32, 64\]"),
            (
                {"scales": scales + 128 * (np.arange(64)[:, None] == 3).astype(np.uint8)},
                f"{name} has scales of 255",
            ),
            # 6 * 2**126 is beyond fp32.
            ({"scales": scales * 0 + 253}, f"{name} times its scales has values that are not finite"),
        ]
    ):
        with pytest.raises(CheckpointMismatchError, match=match):
            load_huggingface(in_mxfp4(tmp_path / str(number), **changed), block_scaled="dequantize")
