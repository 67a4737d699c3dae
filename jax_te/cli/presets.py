"""Presets of ``jax-te train``: model shapes with settings that train them. Data only, so that ``--help`` is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_GPT = {
    "normalization": "LayerNorm",
    "activation": "gelu",
    "position_embedding": "learned_absolute",
    "bias": True,
    "tie_embeddings": True,
}
_LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding": "rope",
    "bias": False,
    "tie_embeddings": False,
}
_LONG_RUN = {"steps": 2000, "warmup_steps": 200, "save_every": 500, "eval_every": 250, "log_every": 10}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults for `RunConfig` under one name.

    Args:
        summary: one line for ``--help``.
        values: fields of `jax_te.training.RunConfig`.
    """

    summary: str
    values: dict[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        summary="trains in two minutes on two CPU cores",
        values=_LLAMA
        | {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 384}
        | {"tie_embeddings": True, "seq_len": 128, "batch_size": 16, "learning_rate": 2e-3}
        | {"steps": 600, "warmup_steps": 50, "save_every": 200, "eval_every": 200, "log_every": 10},
    ),
    "gpt-125m": Preset(
        summary="GPT-3 Small's layers",
        values=_GPT
        | {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "num_query_groups": 12, "ffn_hidden_size": 3072}
        | {"seq_len": 1024, "batch_size": 16, "learning_rate": 6e-4}
        | _LONG_RUN,
    ),
    "gpt-1.3b": Preset(
        summary="GPT-3 XL's layers with heads of 128",
        values=_GPT
        | {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "num_query_groups": 16, "ffn_hidden_size": 8192}
        | {"seq_len": 2048, "batch_size": 8, "learning_rate": 2e-4}
        | _LONG_RUN,
    ),
    "llama-1b": Preset(
        summary="Llama 3.2 1B's layers",
        values=_LLAMA
        | {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 8192}
        | {"seq_len": 2048, "batch_size": 8, "learning_rate": 3e-4}
        | _LONG_RUN,
    ),
    "llama-8b-layer": Preset(
        summary="one layer of Llama 3 8B, to measure with",
        values=_LLAMA
        | {"num_layers": 1, "hidden_size": 4096, "num_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336}
        | {"seq_len": 2048, "batch_size": 4, "learning_rate": 3e-4}
        | _LONG_RUN
        | {"steps": 200, "warmup_steps": 20},
    ),
}
"""Every preset by name. The models read bytes, so their embeddings have 256 rows, not the original's vocabulary."""


def preset_table() -> str:
    """The presets as text for ``--help``: sizes, form, and training defaults of each."""
    lines = ["presets (each value can be overridden by its option):", ""]
    lines.append("  name            layers hidden heads groups   ffn   seq batch  steps learning-rate")
    for name, preset in PRESETS.items():
        v = preset.values
        lines.append(
            f"  {name:<15} {v['num_layers']:>6} {v['hidden_size']:>6} {v['num_heads']:>5} {v['num_query_groups']:>6} "
            f"{v['ffn_hidden_size']:>5} {v['seq_len']:>5} {v['batch_size']:>5} {v['steps']:>6} {v['learning_rate']:g}"
        )
    lines.append("")
    for name, preset in PRESETS.items():
        v = preset.values
        tied = "tied" if v["tie_embeddings"] else "separate"
        bias = "biases" if v["bias"] else "no biases"
        form = f"{v['position_embedding']} positions, {v['normalization']}, {v['activation']}, {bias}, {tied} head"
        lines.append(f"  {name:<15} {preset.summary}: {form};")
        lines.append(
            f"{'':<18}warm-up {v['warmup_steps']} steps, save every {v['save_every']}, "
            f"held-out loss every {v['eval_every']}"
        )
    return "\n".join(lines)
