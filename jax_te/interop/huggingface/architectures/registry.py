"""The supported architectures."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jax_te.interop.huggingface.architectures.bert import BERT, MASKED_BERT, MASKED_ROBERTA, ROBERTA
from jax_te.interop.huggingface.architectures.decoders import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
)
from jax_te.interop.huggingface.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM_MOE
from jax_te.interop.huggingface.architectures.gpt_oss import GPT_OSS
from jax_te.interop.huggingface.architectures.mixtures import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from jax_te.interop.huggingface.architectures.t5 import MT5, T5
from jax_te.interop.huggingface.config_json import INITIAL_DEVIATION, ConfigJson
from jax_te.interop.tables import Architecture, Form

ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "OlmoeForCausalLM": OLMOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": MT5,
    "BertForMaskedLM": MASKED_BERT,
    "BertModel": BERT,
    "RobertaForMaskedLM": MASKED_ROBERTA,
    "RobertaModel": ROBERTA,
}
"""Classes of transformers whose checkpoints `load_huggingface` reads and `save_huggingface` writes."""

_OUT_OF_SCOPE = {
    "gated delta net": r"qwen3next|qwen35|kimilinear|olmohybrid",
    "state spaces": r"mamba|falconmamba|jamba|bamba|zamba|nemotronh|falconh1|granitemoehybrid",
    "sparse attention (DSA)": r"deepseekv32|glmmoedsa",
    "vision tower": r"\w*(vl|llava|vision|ocr)|mllama|llama4|paligemma|idefics|glm4v|glm46v|kimik25|"
    r"(gemma[34]\w*|mistral3)forconditionalgeneration",
}
"""Parts of models that are not there by choice, with how the names of the classes and types that have them begin."""


def _out_of_scope(name: str) -> str:
    """Return the sentence about what a class or a ``model_type`` has that is out of scope; empty without such a part.

    >>> _out_of_scope("Qwen3NextForCausalLM"), _out_of_scope("FalconForCausalLM")
    ('its gated delta net is out of scope; ', '')
    """
    plain = name.replace("_", "").lower()
    part = next((part for part, names in _OUT_OF_SCOPE.items() if re.match(names, plain)), None)
    return "" if part is None else f"its {part} {'are' if part.endswith('s') else 'is'} out of scope; "


def named_classes(values: Mapping[str, Any]) -> list[str]:
    """Return the supported classes that a ``config.json`` may be of: the one it names, or those of its ``model_type``.

    >>> named_classes({"model_type": "llama"}), named_classes({"architectures": ["BertModel"], "model_type": "bert"})
    (['LlamaForCausalLM'], ['BertModel'])
    """
    names, kind = values.get("architectures"), values.get("model_type")
    if names:
        return [name for name in ARCHITECTURES if isinstance(names, list) and names[0] == name]
    return [name for name, known in ARCHITECTURES.items() if kind in (known.model_type, *known.other_model_types)]


def named_architecture(given: ConfigJson) -> tuple[str, Architecture]:
    """Return the architecture that a ``config.json`` names, or the one of its ``model_type``; and its class's name.

    Raises:
        ValueError: for another one, and for a type that several classes have.
    """
    names, kind = given.take("architectures", list, []), given.take("model_type", str, "")
    found = named_classes({"architectures": names, "model_type": kind})
    if len(found) > 1:
        raise given.refused(
            "architectures",
            names,
            f"model_type {kind!r} is that of {' and '.join(found)}; add the one that the tensors are of, such as "
            f'"architectures": ["{found[0]}"]',
        )
    known = ARCHITECTURES[found[0]] if found else None
    if known is None or kind not in (known.model_type, *known.other_model_types):
        named = names[0] if names and isinstance(names[0], str) else kind
        why = f"{_out_of_scope(named[:200])}model_type is {kind[:60]!r}; known: {', '.join(ARCHITECTURES)}"
        raise given.refused("architectures", names[:3], why)
    return found[0], known


def read_form(
    values: Mapping[str, Any], what: str, tensors: Collection[Any], ignore: Collection[str] = ()
) -> tuple[Architecture, Form]:
    """Return the form that a ``config.json`` describes.

    Args:
        values: the fields.
        what: the file's name, for messages.
        tensors: tensors of the model; it has no more layers than these name.
        ignore: names of unknown fields that a caller knows to change no number.

    Raises:
        ValueError: for another architecture, and for an unsupported field.
    """
    given = ConfigJson(values, what, tensors)
    _, architecture = named_architecture(given)
    form = architecture.form(given)
    deviation = given.take(INITIAL_DEVIATION, float, form.config.init_method_std)
    given.finish(ignore)
    return architecture, replace(form, config=replace(form.config, init_method_std=deviation))
