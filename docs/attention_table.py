"""Print the table of docs/attention.md, from the code that chooses a backend: ``python docs/attention_table.py``.

It needs Transformer Engine (its pure-JAX mode is enough) and no GPU. On a GPU, ``te`` also asks cuDNN about each call,
which may still say no; the table leaves that out.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import get_args
from unittest import mock

import jax
import jax.numpy as jnp

from jax_te.ops import AttentionSpec
from jax_te.ops.attention.spec import BiasType, MaskType, SoftmaxType
from jax_te.ops.te.attention import unsupported
from jax_te.ops.xla.attention import attention_supports

BASE = AttentionSpec(
    dtype=jnp.bfloat16, batch=2, q_length=1024, kv_length=1024, heads=8, groups=8, head_dim=64, v_head_dim=64,
    mask_type="causal", window=(-1, 0), scale=0.125, dropout_rate=0.0, packed=False,
)  # fmt: skip

BIAS_SHAPE = (1, 8, 1024, 1024)

PACKED = {"mask_type": "padding_causal", "max_segments": 4}

CALLS: dict[str, dict] = {
    **{f"mask `{name}`": {"mask_type": name, "window": (-1, -1)} for name in get_args(MaskType)},
    "window": {"window": (128, 0)},
    **{
        f"bias `{name}`": {"bias_type": name, "bias_shape": BIAS_SHAPE}
        for name in get_args(BiasType)
        if name != "no_bias"
    },
    **{f"softmax `{name}`": {"softmax_type": name} for name in get_args(SoftmaxType)},
    "softcap of logits": {"logit_softcap": 50.0},
    "dropout": {"dropout_rate": 0.1},
    "bias `[b, 1, 1, s_kv]`": {"bias_type": "post_scale_bias", "bias_shape": (2, 1, 1, 1024)},
    "packed sequences": PACKED,
    "packed sequences, heads of 256": {**PACKED, "head_dim": 256, "v_head_dim": 256},
    "packed sequences and a bias": {**PACKED, "bias_type": "post_scale_bias", "bias_shape": BIAS_SHAPE},
    "max logits": {"return_max_logit": True},
    "grouped queries": {"groups": 2},
    "one array `[b, s, 3, n, d]`": {"packed": True},
    "heads of 256": {"head_dim": 256, "v_head_dim": 256},
    "values of another head size": {"head_dim": 192, "v_head_dim": 128},
    "fp16": {"dtype": jnp.float16},
    "fp32": {"dtype": jnp.float32},
    "64 positions": {"q_length": 64, "kv_length": 64},
    "1000 positions": {"q_length": 1000, "kv_length": 1000},
    "one token and a KV cache": {"mask_type": "padding_causal_bottom_right", "q_length": 1},
    "one token and a KV cache of a window": {"mask_type": "arbitrary", "window": (-1, -1), "q_length": 1},
}


def through_jax_nn(spec: AttentionSpec) -> bool:
    """Whether the XLA backend calls cuDNN on a GPU."""
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        return "cuDNN" in attention_supports(spec)[1]


def plain(spec: AttentionSpec) -> bool:
    """Whether the XLA backend runs the call without cuDNN."""
    return attention_supports(spec)[0]


def table() -> str:
    """The table and, below it, why TE is not asked."""
    lines = ["| call | `te`: cuDNN through TE | `xla`: cuDNN through jax.nn | `xla`: plain JAX |", "|---|---|---|---|"]
    refusals = []
    for label, fields in CALLS.items():
        spec = dataclasses.replace(BASE, **fields)
        lacks = unsupported(spec)
        cells = (
            "asked" if lacks is None else "–",
            *("yes" if ok else "–" for ok in (through_jax_nn(spec), plain(spec))),
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
        if lacks is not None:
            item = f"- {label}: {lacks}"
            refusals.append(textwrap.fill(item, 118, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join([*lines, "", "Why `te` does not ask cuDNN:", "", *refusals])


if __name__ == "__main__":
    print(table())
