"""A small model of each family of Hugging Face that is read, made from the fields of a ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.interop.huggingface import save_huggingface
from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.tables import Form
from jax_te.models import Execution
from tests.support.tokenizers import SPANS, WORDS, write_special_tokenizer, write_tokenizer

VOCAB, LENGTH = 96, 64

# Sizes are multiples of 32, the alignment of MXFP8 and NVFP4, also where two devices share them.
LLAMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "vocab_size": VOCAB,
}  # fmt: skip
WINDOWED = LLAMA | {"sliding_window": 5}
QWEN = WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}
MIXTURE = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = MIXTURE | {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1,
}  # fmt: skip
del LATENT["head_dim"]
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "n_positions": LENGTH}
T5 |= {"vocab_size": VOCAB, "dropout_rate": 0.0}
BERT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": LENGTH, "vocab_size": VOCAB, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WITHOUT_HEAD_SIZE = {name: value for name, value in LLAMA.items() if name != "head_dim"} | {"num_key_value_heads": 4}
ONE_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": LENGTH, "vocab_size": VOCAB}
        | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "LlamaForCausalLM": ("llama", LLAMA),
    "MistralForCausalLM": ("mistral", WINDOWED),
    "Olmo2ForCausalLM": ("olmo2", WITHOUT_HEAD_SIZE),
    "Phi3ForCausalLM": ("phi3", WITHOUT_HEAD_SIZE | {"sliding_window": 5, "partial_rotary_factor": 0.5}),
    "Qwen2ForCausalLM": ("qwen2", QWEN),
    "Qwen3ForCausalLM": ("qwen3", QWEN),
    "GemmaForCausalLM": ("gemma", LLAMA),
    "Gemma2ForCausalLM": ("gemma2", WINDOWED),
    "Gemma3ForCausalLM": ("gemma3_text", WINDOWED | ONE_WINDOW),
    "GPTNeoXForCausalLM": (
        "gpt_neox",
        {name: value for name, value in WITHOUT_HEAD_SIZE.items() if name != "num_key_value_heads"},
    ),
    "MixtralForCausalLM": ("mixtral", LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        WITHOUT_HEAD_SIZE
        | {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
        },
    ),
    "Qwen3MoeForCausalLM": ("qwen3_moe", MIXTURE | {"num_experts": 8, "norm_topk_prob": True}),
    "OlmoeForCausalLM": ("olmoe", WITHOUT_HEAD_SIZE | {"num_experts": 8, "num_experts_per_tok": 2}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", LATENT | {"num_nextn_predict_layers": 1}),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        MIXTURE
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        }
        | {"num_nextn_predict_layers": 1},
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        WINDOWED | {"num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 0.7} | ONE_WINDOW,
    ),
    "T5ForConditionalGeneration": ("t5", T5),
    # With a head of its own, as published ones have.
    "MT5ForConditionalGeneration": ("mt5", T5 | {"tie_word_embeddings": False}),
    "BertForMaskedLM": ("bert", BERT),
    "RobertaForMaskedLM": ("roberta", BERT | {"type_vocab_size": 1}),
}
"""``model_type`` and sizes for each class of ``config.json``."""

ENCODERS_ALONE = ("BertModel", "RobertaModel")
"""Classes without a loss, whose layers are those of the masked models."""

MIXED = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
)
"""Families with layers of two kinds."""


def family_form(name: str, layers: int = 2, **fields: Any) -> tuple[Any, Form]:
    """Return the architecture of a class and the form of a small model, with fields of its configuration changed."""
    kind, values = FAMILIES[name]
    values = values | {"architectures": [name], "model_type": kind}
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in values:
            values = values | {key: layers}
    if "layer_types" in values:
        values = values | {"layer_types": values["layer_types"] * (layers // 2)}
    architecture, form = read_form(values, "config.json", range(1000))
    dtype = form.config.params_dtype
    return architecture, form.run_as(fields, dtype, architecture.described_by)


def family_model(name: str, layers: int = 2, execution: Execution | None = None, **fields: Any) -> Any:
    """Return a small model of a class with random weights."""
    architecture, form = family_form(name, layers, **fields)
    return architecture.build(form, execution or Execution(), nnx.Rngs(0))


def family_config(name: str) -> TransformerConfig:
    """Return the configuration of a class's small model."""
    return family_form(name)[1].config


def family_folder(name: str, path: Path) -> Path:
    """Write a class's small model, with a tokenizer of its kind and a text of 3,000 words, ``text.txt``."""
    # An mT5 can be written as a T5, too.
    save_huggingface(family_model(name), path, architecture=name if name.startswith("MT5") else None)
    if FAMILIES[name][0] in ("t5", "mt5"):
        write_special_tokenizer(path / "tokenizer.json", SPANS, after="</s>")
    elif FAMILIES[name][0] in ("bert", "roberta"):
        write_special_tokenizer(path / "tokenizer.json", before="[CLS]", after="[SEP]")
    else:
        write_tokenizer(path / "tokenizer.json")
    (path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 3000)))
    return path
