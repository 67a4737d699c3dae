"""Models of transformers, made here with its own code and random weights: the same logits and tokens, and back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_REASON = "compares with transformers: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

from jax_te.config import TransformerConfig  # noqa: E402
from jax_te.interop.huggingface import ARCHITECTURES, load_huggingface, save_huggingface  # noqa: E402
from jax_te.interop.huggingface.architectures.registry import read_form  # noqa: E402
from jax_te.interop.huggingface.folder import open_tensors  # noqa: E402
from jax_te.layers import LinearScaling, Llama3Scaling, YarnScaling  # noqa: E402
from jax_te.models import BertModel, GPTModel, Multipliers, RotaryPositions, T5Model, generate  # noqa: E402
from tests.support.numerics import assert_close, quick_jit  # noqa: E402

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, other options": (
        "GPT2",
        GPT2
        | {"n_inner": 40, "activation_function": "relu", "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "llama 3": (
        "Llama",
        LLAMA | {"rope_parameters": ROPE | {"rope_theta": 5e5, "original_max_position_embeddings": 16}},
    ),
    "llama, other options": (
        "Llama",
        LLAMA
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "qwen 3": ("Qwen3", LLAMA | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen 3, windows": (
        "Qwen3",
        LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen 2": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma 2": (
        "Gemma2",
        LLAMA
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5, "attn_logit_softcapping": 1.5}
        | {"final_logit_softcapping": 2.0, "num_hidden_layers": 3},
    ),
    "gemma 2, relu": ("Gemma2", LLAMA | {"hidden_activation": "relu"}),
    "gemma 3": (
        "Gemma3",
        LLAMA
        | {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5, "head_dim": 16}),
    "mistral, no window": ("Mistral", LLAMA | {"sliding_window": None, "tie_word_embeddings": True}),
    "phi 3": ("Phi3", LLAMA | {"sliding_window": 5}),
    "phi 3, other options": (
        "Phi3",
        LLAMA
        | {"num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "olmo 2": ("Olmo2", LLAMA),
    "olmo 2, other options": (
        "Olmo2",
        LLAMA
        | {"num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox, other options": (
        "GPTNeoX",
        NEOX
        | {"use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}
        | {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        },
    ),
    "gemma": ("Gemma", LLAMA | {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, yarn": ("Llama", LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}}),
}

MIXTURE = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES |= {
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, other options": (
        "Mixtral",
        LLAMA
        | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5, "tie_word_embeddings": True}
        | {"head_dim": 16},
    ),
    "qwen 3 moe": ("Qwen3Moe", MIXTURE | {"num_experts": 4, "norm_topk_prob": True, "head_dim": 16}),
    "qwen 3 moe, other options": (
        "Qwen3Moe",
        MIXTURE
        | {"num_experts": 4, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"use_sliding_window": True, "sliding_window": 5, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen 2 moe": ("Qwen2Moe", MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 40}),
    "qwen 2 moe, other options": (
        "Qwen2Moe",
        MIXTURE
        | {"num_experts": 4, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 5, "mlp_only_layers": [0]},
    ),
}
CASES |= {
    "olmoe": ("Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe, other options": (
        "Olmoe",
        LLAMA
        | {"num_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "olmoe, probabilities of the chosen": (
        "Olmoe",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}
LATENT = LLAMA | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_hidden_layers": 3,
}  # fmt: skip
DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.7}
DEEPSEEK_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
CASES |= {
    "deepseek v3": ("DeepseekV3", LATENT | GROUPED | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v3, other options": (
        "DeepseekV3",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
        | {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0, "tie_word_embeddings": True}
        | {"routed_scaling_factor": 1.0},
    ),
    "deepseek v2": ("DeepseekV2", LATENT | GROUPED | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek v2, other options": (
        "DeepseekV2",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        | {"rope_parameters": DEEPSEEK_YARN, "routed_scaling_factor": 2.5},
    ),
}
GLM = MIXTURE | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 16}
CASES |= {
    "glm 4.5": ("Glm4Moe", GLM | {"n_routed_experts": 4, "attention_bias": True}),
    "glm 4.5, other options": (
        "Glm4Moe",
        GLM
        | GROUPED
        | {"use_qk_norm": True, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}},
    ),
}
GPT_OSS = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 3}
OSS_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "truncate": False}
OSS_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
CASES |= {
    "gpt-oss": ("GptOss", GPT_OSS | {"sliding_window": 5, "rope_parameters": OSS_YARN, "swiglu_limit": 0.7}),
    "gpt-oss, other options": (
        "GptOss",
        GPT_OSS
        | {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True, "num_experts_per_tok": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
}

T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
CASES |= {
    "bert": ("Bert", BERT),
    "bert, other options": ("Bert", BERT | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    "roberta": ("Roberta", BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "roberta, another padding token": ("Roberta", BERT | {"pad_token_id": 0, "layer_norm_eps": 1e-3}),
    "t5": ("T5", T5 | {"num_decoder_layers": 1, "relative_attention_num_buckets": 8}),
    "t5 v1.1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", T5),
    "mt5, tied": ("MT5", T5 | {"num_decoder_layers": 1, "relative_attention_num_buckets": 8}),
}


def test_every_class_that_is_read_has_a_case() -> None:
    kinds = {re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", name) for name in ARCHITECTURES}
    assert kinds == {kind for kind, _ in CASES.values()}


def make(name: str, folder: Path, **sizes: Any) -> Any:
    """A model of transformers with random weights, written to a folder in several files."""
    kind, options = CASES[name]
    # No tokens of its own that end a text: the one that transformers takes by default is not in the vocabulary.
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(
        **{"vocab_size": 67, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | options | sizes
    )
    model = next(
        getattr(transformers, kind + suffix)
        for suffix in ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        if hasattr(transformers, kind + suffix)
    )
    model = model(config).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        # Large enough that every part shows in the logits; the scales of norms are around 1.
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    for name_of_buffer, buffer in model.named_buffers():
        if name_of_buffer.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    if name in ("t5 v1.1", "mt5"):  # whose head is its own in published files, although a new model shares it
        model.lm_head.weight = torch.nn.Parameter(torch.randn(67, 32))
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def loaded(folder: Path) -> Any:
    """The model of a folder, in evaluation, as transformers gives its models: those with dropout draw nothing."""
    model = load_huggingface(folder)
    model.eval()
    return model


def tokens_of(model: Any, length: int = 12) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(2, model.config.vocab_size, (2, length))
    return tokens  # none of them padding, from whose number RoBERTa counts positions


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    decoder = {"decoder_input_ids": torch.tensor(tokens[:, :7])} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(torch.tensor(tokens), **decoder).logits.numpy()


def said_by(model: T5Model, tokens: jax.Array, steps: int) -> jax.Array:
    """What an encoder-decoder says of the tokens, the most likely token at each step."""
    said = jnp.zeros((len(tokens), steps + 1), jnp.int32)
    run = quick_jit(lambda model, tokens, said: jnp.argmax(model(tokens, said), -1).astype(jnp.int32))
    for i in range(steps):  # later positions are not seen
        said = said.at[:, i + 1].set(run(model, tokens, said)[:, i])
    return said


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = loaded(tmp_path)
    tokens = tokens_of(theirs)
    expected = logits_of(theirs, tokens)
    prompt = jnp.asarray(tokens, jnp.int32)
    encoder_decoder = isinstance(ours, T5Model)
    arrays = (prompt, prompt[:, :7]) if encoder_decoder else (prompt,)
    actual = quick_jit(lambda model, *arrays: model(*arrays))(ours, *arrays)
    # Two layers: some twenty rounded steps, each of a few units of 2^-24. T5 does not scale its scores: a score of 40
    # errs by as many units, which is the relative error of its exponential.
    assert_close(actual, expected, 2.0**-16 if encoder_decoder else 2.0**-18)
    assert np.abs(expected).max() > 0.3
    if isinstance(ours, BertModel):  # which generates nothing
        return
    options = {"max_new_tokens": 8, "do_sample": False} | ({"decoder_start_token_id": 0} if encoder_decoder else {})
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor(tokens), **options).numpy()
    if encoder_decoder:
        found = said_by(ours, prompt, 8)
    else:
        found = generate(ours, prompt, steps=8, key=jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_transformers_loads(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path / "theirs")
    model = load_huggingface(tmp_path / "theirs")
    save_huggingface(model, tmp_path / "ours", max_shard_size=30_000, like=tmp_path / "theirs")
    kinds = [json.loads((tmp_path / each / "config.json").read_text())["model_type"] for each in ("ours", "theirs")]
    assert kinds[0] == kinds[1]
    back, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    tokens = tokens_of(theirs)
    np.testing.assert_array_equal(logits_of(back.eval(), tokens), logits_of(theirs, tokens))
    state, expected = back.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    files, others = (open_tensors(tmp_path / name)[0] for name in ("ours", "theirs"))
    assert files.keys() == others.keys()
    assert all(np.array_equal(files[key], others[key]) for key in files)


BLOCK: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "kv_channels": 16,
}  # fmt: skip
GEMMA2 = {"activation": "geglu", "layernorm_zero_centered_gamma": True, "block_output_layernorm": True}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=8, mscale=2.0, mscale_all_dim=0.7)
OURS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # options of the configuration, of the positions, multipliers
    "LlamaForCausalLM": ({}, {"base": 500.0, "scaling": LinearScaling(factor=2.0)}, {}),
    "MistralForCausalLM": ({"window_size": (4, 0)}, {"base": 500.0}, {}),
    "Phi3ForCausalLM": ({"kv_channels": 8, "window_size": (4, 0)}, {"base": 500.0, "percent": 0.5}, {}),
    "Qwen2ForCausalLM": ({"add_qkv_bias": True}, {"base": 500.0, "scaling": YARN}, {}),
    "Qwen3ForCausalLM": (
        {"qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": (0, 1)},
        {"scaling": Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=16)},
        {},
    ),
    "Olmo2ForCausalLM": (
        {"kv_channels": 8, "qk_layernorm": True, "qk_layernorm_across_heads": True}
        | {"block_input_layernorm": False, "block_output_layernorm": True},
        {"base": 500.0},
        {},
    ),
    "GPTNeoXForCausalLM": (
        {"normalization": "LayerNorm", "activation": "gelu_exact", "add_bias_linear": True, "num_query_groups": 4}
        | {"kv_channels": 8, "parallel_attention_mlp": True},
        {"base": 500.0, "percent": 0.5, "scaling": YARN},
        {},
    ),
    "Gemma2ForCausalLM, SwiGLU": (GEMMA2 | {"activation": "swiglu"}, {}, {"embedding": 32**0.5, "softcap": 2.0}),
    "Gemma3ForCausalLM, exact GELU": (
        GEMMA2 | {"activation": ("gelu_exact", "linear"), "qk_layernorm": True},
        {"window_base": 50.0},
        {"embedding": 32**0.5},
    ),
    "Gemma2ForCausalLM": (GEMMA2 | {"logit_softcap": 1.5}, {"base": 500.0}, {"embedding": 32**0.5, "softcap": 2.0}),
    "Gemma3ForCausalLM": (GEMMA2 | {"qk_layernorm": True}, {"window_base": 50.0}, {"embedding": 32**0.5}),
}  # fmt: skip


ROTATE_A_PART = {"Phi3ForCausalLM", "GPTNeoXForCausalLM"}


def our_model(name: str, changed: dict[str, Any] | None = None, **rotary: Any) -> GPTModel:
    """A model that was made here, with options that this architecture can say, but for ``changed`` ones."""
    options, positions, multipliers = OURS[name]
    model = GPTModel(
        TransformerConfig(**BLOCK | options | (changed or {})),
        vocab_size=67,
        max_sequence_length=32,
        position_embedding_type=RotaryPositions(**positions | rotary),
        share_embeddings_and_output_weights=name.startswith("Gemma"),
        rngs=nnx.Rngs(0),
    )
    model.multipliers = Multipliers(**multipliers)
    # Larger weights than those of the start: the order of tokens and every option shows in the logits.
    params = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    nnx.update(model, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), params))
    return model


@pytest.mark.parametrize("name", OURS)
def test_a_model_made_here_is_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    model = our_model(name)
    save_huggingface(model, tmp_path)
    theirs, info = getattr(transformers, name.partition(",")[0]).from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    tokens = tokens_of(theirs, 24)
    actual = quick_jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32))
    assert_close(actual, logits_of(theirs.eval(), tokens), 2.0**-18)


CHANGES: list[dict[str, Any]] = [
    *({"activation": name} for name in ("swiglu", "geglu", "reglu", ("gelu_exact", "linear"), "gelu", "relu")),
    {"softmax_scale": 0.25},
    {"window_size": (3, 0)},
    {"window_size": (3, 0), "window_attn_skip_freq": 2},
    {"layernorm_epsilon": 0.05},
    {"logit_softcap": 4.0},
    {"qk_layernorm": True},
    {"add_qkv_bias": True},
    {"add_bias_linear": True},
    {"layernorm_zero_centered_gamma": True},
    {"parallel_attention_mlp": True},
    {"activation_func_clamp_value": 0.5},
    {"softmax_type": "learnable"},
    {"kv_channels": 12},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OURS if "," not in name])
def test_another_option_is_refused_or_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    """Read by transformers: a reader of our own would follow a field that transformers' classes ignore."""
    same = 0
    for number, changed in enumerate(CHANGES):
        folder = tmp_path / str(number)
        try:
            model = our_model(name, changed)
            save_huggingface(model, folder)
        except ValueError:
            continue
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        tokens = tokens_of(theirs, 24)
        actual = quick_jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32))
        assert_close(actual, logits_of(theirs, tokens), 2.0**-16, what=str(changed))
        same += 1
    assert same > 2


@pytest.mark.parametrize("name", [name for name in OURS if name not in ROTATE_A_PART and "," not in name])
def test_partial_positions_are_not_written_for_classes_that_turn_whole_heads(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}: [^;]*percent=0\.5"):
        save_huggingface(our_model(name, percent=0.5), tmp_path / "none", architecture=name)
    # Why: with the field in its config.json the class computes what it computes without.
    save_huggingface(our_model(name, scaling=None), tmp_path / "whole")
    config, logits = tmp_path / "whole" / "config.json", []
    for extra in ({}, {"partial_rotary_factor": 0.5}):
        config.write_text(json.dumps(json.loads(config.read_text()) | extra))
        theirs = getattr(transformers, name).from_pretrained(config.parent, attn_implementation="eager")
        logits.append(logits_of(theirs.eval(), tokens_of(theirs, 24)))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_field_of_transformers_own_configuration_is_known(name: str) -> None:
    values = getattr(transformers, name).config_class().to_dict() | {"architectures": [name]}
    if values.get("num_experts_per_tok", 1) is None:  # DeepSeek-V2's, without which its class does not run
        values["num_experts_per_tok"] = 6
    _, form = read_form(values, "config.json", range(1000))
    assert form.config.num_layers > 0


def test_a_checkpoint_in_bf16(tmp_path: Path) -> None:
    theirs = make("llama 3", tmp_path).to(torch.bfloat16)
    for path in tmp_path.glob("model*"):
        path.unlink()
    theirs.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    assert ours.config.params_dtype == jnp.bfloat16
    save_huggingface(ours, tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in back.state_dict().items())
    # And as fp32 parameters, cast because it was asked for.
    wide = load_huggingface(tmp_path, dtype=jnp.float32)
    tokens = tokens_of(theirs)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)  # not .float(): its rotary table is in bf16
    assert_close(wide(jnp.asarray(tokens, jnp.int32)), logits_of(theirs, tokens), 2.0**-18)


def test_a_checkpoint_of_the_model_without_its_head(tmp_path: Path) -> None:
    """As that of GPT-2 itself: names without their first part, masks among the tensors, a head that is stored twice."""
    theirs = make("gpt2", tmp_path)
    tensors = {name.removeprefix("transformer."): value.clone() for name, value in theirs.state_dict().items()}
    del tensors["lm_head.weight"]
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    from safetensors.torch import save_file

    for path in tmp_path.glob("model*"):
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = tokens_of(theirs)
    logits = logits_of(theirs, tokens)
    assert_close(loaded(tmp_path)(jnp.asarray(tokens, jnp.int32)), logits, 2.0**-18)
    names = {
        name if name.startswith("transformer.") else f"transformer.{name}": value for name, value in tensors.items()
    }
    save_file(names | {"lm_head.weight": tensors["wte.weight"].clone()}, tmp_path / "model.safetensors")
    assert_close(loaded(tmp_path)(jnp.asarray(tokens, jnp.int32)), logits, 2.0**-18)
    save_file(names | {"lm_head.weight": tensors["wte.weight"] + 1.0}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is unexpected"):
        load_huggingface(tmp_path)


def test_older_fields_of_rotary_positions(tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling``, as in files that were written before transformers 5."""
    theirs = make("llama 3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokens = tokens_of(theirs)
    assert_close(loaded(tmp_path)(jnp.asarray(tokens, jnp.int32)), logits_of(theirs, tokens), 2.0**-18)


def test_padding_and_pooler_of_roberta(tmp_path: Path) -> None:
    theirs = make("roberta", tmp_path)
    tokens, lengths = tokens_of(theirs), np.array([12, 7])
    tokens[1, 7:] = 1
    with torch.no_grad():
        out = theirs(torch.tensor(tokens), attention_mask=torch.tensor(tokens != 1)).logits.numpy()
    ours, ids = loaded(tmp_path), jnp.asarray(tokens, jnp.int32)
    assert (ours.max_sequence_length, ours.first_position) == (14, 2)
    actual = np.asarray(quick_jit(lambda model, *a: model(a[0], lengths=a[1]))(ours, ids, jnp.asarray(lengths)))
    for row, length in enumerate(lengths):
        assert_close(actual[row, :length], out[row, :length], 2.0**-18)

    encoder = transformers.RobertaModel(theirs.config).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    ours = loaded(tmp_path / "encoder")
    with torch.no_grad():
        pooled = encoder(torch.tensor(tokens[:1])).pooler_output.numpy()
    assert_close(ours.pool(ours.encode(ids[:1])), pooled, 2.0**-18)
    save_huggingface(ours, tmp_path / "back")
    back, info = transformers.RobertaModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, encoder.state_dict()[key]) for key, value in back.state_dict().items())


def test_padding_token_types_and_pooler_of_bert(tmp_path: Path) -> None:
    """And the names of BERT's first files: norms' ``gamma`` and ``beta``, tensors of a head that is not asked for."""
    theirs = make("bert", tmp_path)
    tokens, types = tokens_of(theirs), np.random.default_rng(1).integers(0, 2, (2, 12))
    lengths = np.array([12, 7])
    mask = torch.tensor(np.arange(12) < lengths[:, None])
    with torch.no_grad():
        out = theirs(torch.tensor(tokens), attention_mask=mask, token_type_ids=torch.tensor(types)).logits.numpy()
    arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(types, jnp.int32), jnp.asarray(lengths, jnp.int32)
    run = quick_jit(lambda model, tokens, types, lengths: model(tokens, tokentypes=types, lengths=lengths))
    actual = np.asarray(run(loaded(tmp_path), *arrays))
    for row, length in enumerate(lengths):
        assert_close(actual[row, :length], out[row, :length], 2.0**-18)

    encoder = transformers.BertModel(theirs.config).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    ours = loaded(tmp_path / "encoder")
    with torch.no_grad():
        pooled = encoder(torch.tensor(tokens), token_type_ids=torch.tensor(types)).pooler_output.numpy()
    assert_close(ours.pool(ours.encode(arrays[0], tokentypes=arrays[1])), pooled, 2.0**-18)
    save_huggingface(ours, tmp_path / "back")
    back, info = transformers.BertModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, encoder.state_dict()[key]) for key, value in back.state_dict().items())

    from safetensors.torch import save_file

    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {"cls.seq_relationship.weight": torch.ones(2, 32), "bert.pooler.dense.weight": torch.ones(32, 32)}
    for name, value in theirs.state_dict().items():
        older = next((name.replace(now, then) for now, then in names.items() if name.endswith(now)), name)
        tensors[older] = value.clone()
    for path in tmp_path.glob("model*"):
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(run(loaded(tmp_path), *arrays), actual)
