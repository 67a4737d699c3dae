"""Presets of ``jax-te train``: model sizes with training settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax_te._text import table

_GPT = {"normalization": "LayerNorm", "activation": "gelu", "position_embedding": "learned_absolute"}
_GPT |= {"bias": True, "tie_embeddings": True}
_LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "position_embedding": "rope"}
_LLAMA |= {"bias": False, "tie_embeddings": False}
_LONG_RUN = {"steps": 2000, "warmup_steps": 200, "save_every": 500, "eval_every": 250, "log_every": 10}
# Qwen3-30B-A3B's: heads of 128 whatever the hidden size is, each with norms of queries and keys.
_QWEN3_MOE = _LLAMA | {"kv_channels": 128, "qk_layernorm": True, "num_experts": 128, "moe_router_topk": 8}
_QWEN3_MOE |= {"moe_ffn_hidden_size": 768, "moe_router_pre_softmax": False, "moe_aux_loss_coeff": 1e-3}
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "seq_len", "batch_size")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values of options under one name.

    Args:
        summary: summary in one line, for ``--help``.
        values: fields of `jax_te.cli.run_config.RunConfig`.
    """

    summary: str
    values: dict[str, Any] = field(default_factory=dict)


def _preset(summary: str, form: dict[str, Any], sizes: tuple[int, ...], learning_rate: float, **other: Any) -> Preset:
    values = form | _LONG_RUN | dict(zip(_SIZES, sizes, strict=True)) | {"learning_rate": learning_rate} | other
    return Preset(summary=summary, values=values)


_EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 192, "moe_aux_loss_coeff": 0.01}
_TINY = {"steps": 600, "warmup_steps": 50, "save_every": 200, "eval_every": 200, "tie_embeddings": True}
PRESETS: dict[str, Preset] = {
    "tiny": _preset("trains in two minutes on two CPU cores", _LLAMA, (4, 128, 4, 4, 384, 128, 16), 2e-3, **_TINY),
    "moe-tiny": _preset(
        *("tiny with experts, two for each token", _LLAMA, (4, 128, 4, 4, 384, 128, 16), 2e-3),
        **(_TINY | _EXPERTS),
    ),
    "gpt-125m": _preset("GPT-3 Small's layers", _GPT, (12, 768, 12, 12, 3072, 1024, 16), 6e-4),
    "gpt-1.3b": _preset("GPT-3 XL's layers with heads of 128", _GPT, (24, 2048, 16, 16, 8192, 2048, 8), 2e-4),
    "llama-1b": _preset("Llama 3.2 1B's layers", _LLAMA, (16, 2048, 32, 8, 8192, 2048, 8), 3e-4),
    "qwen3-moe-3b": _preset(
        *("five of Qwen3-30B-A3B's layers", _QWEN3_MOE, (5, 2048, 32, 4, 6144, 4096, 8), 2e-4), microbatches=2
    ),
    # Not for training: one layer of a model that does not fit, to measure its step on one device.
    "llama-8b-layer": _preset(
        *("one layer of Llama 3 8B, to measure with", _LLAMA, (1, 4096, 32, 8, 14336, 2048, 4), 3e-4),
        steps=200,
        warmup_steps=20,
    ),
}
"""Every preset by name. Without a tokenizer they read bytes: 256 rows of the embedding, not the original's."""


def preset_table() -> str:
    """Return the presets as text for ``--help``: sizes, training defaults and form of each."""
    numbers = (*_SIZES, "num_experts", "steps", "learning_rate", "warmup_steps", "save_every", "eval_every")
    header = ("layers", "hidden", "heads", "groups", "ffn", "seq", "batch", "experts")
    header += ("steps", "rate", "warm-up", "save", "eval")
    words = ("norm", "activation", "positions", "biases", "tied")  # the order of _GPT
    sizes = [
        [name, *(f"{preset.values[number]:g}" if number in preset.values else "-" for number in numbers)]
        for name, preset in PRESETS.items()
    ]
    forms = [
        [name, *(str(preset.values[option]) for option in _GPT), preset.summary] for name, preset in PRESETS.items()
    ]
    tables = table(("name", *header), sizes, right=len(numbers)), table(("name", *words, "summary"), forms)
    return "\n\n".join(("presets (each value can be overridden by its option):", *tables))
