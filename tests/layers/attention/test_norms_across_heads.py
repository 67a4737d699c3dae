"""Norms of queries and keys over all heads together: their formula, and their values on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, TransformerConfig
from jax_te.layers import MultiheadAttention
from jax_te.megatron import SelfAttention
from tests.support.meshes import shard
from tests.support.numerics import assert_close, draw, quick_jit
from tests.support.reference import parameters, randomize

B, S, H, N, G = 4, 8, 32, 4, 2
D = H // N


def attention(**options: Any) -> MultiheadAttention:
    return randomize(
        MultiheadAttention(
            H,
            N,
            num_gqa_groups=G,
            attention_dropout=0.0,
            qk_norm_type="RMSNorm",
            qk_norm_before_rope=True,
            qk_norm_across_heads=True,
            normalization="RMSNorm",
            rngs=nnx.Rngs(0),
            **options,
        )
    )


def expected(p: Any, x: np.ndarray) -> np.ndarray:
    def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale

    out = rms(x, p["qkv"]["scale"])
    projected = np.einsum("bsh,hcx->bscx", out, p["qkv"]["kernel"]) + p["qkv"]["bias"]
    *queries, k, v = np.moveaxis(projected, 2, 0)
    # Query head i belongs to group i // r.
    q = np.stack([one.reshape(B, S, G, D) for one in queries], axis=3).reshape(B, S, N * D)
    q, k = rms(q, p["q_norm"]["scale"]), rms(k, p["k_norm"]["scale"])
    q, k, v = q.reshape(B, S, N, D), *(one.reshape(B, S, G, D).repeat(N // G, axis=2) for one in (k, v))
    scores = np.einsum("bind,bjnd->bnij", q, k) / np.sqrt(D)
    scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    context = np.einsum("bnij,bjnd->bind", weights, v).reshape(B, S, H)
    return context @ p["proj"]["kernel"] + p["proj"]["bias"]


@pytest.mark.wide("auto")
def test_norms_are_over_all_heads_on_every_mesh(mesh_mode: str) -> None:
    layer, x = attention(), draw("x", (B, S, H))
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    assert (layer.q_norm.scale.shape, layer.k_norm.scale.shape) == ((N * D,), (G * D,))
    wanted = expected(jax.tree.map(np.float64, parameters(layer)), np.asarray(x, np.float64))
    assert_close(quick_jit(lambda layer, x: layer(x))(shard(layer), x), wanted, 2.0**-18)


def test_megatrons_layer_has_them() -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=N,
        num_query_groups=G,
        normalization="RMSNorm",
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
    )
    other, x = SelfAttention(config, layer_number=1, rngs=nnx.Rngs(0)), draw("x", (B, S, H))
    p = jax.tree.map(np.float64, parameters(randomize(other)))
    names = {"linear_qkv": "qkv", "linear_proj": "proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    renamed = {names[name]: values for name, values in p.items()}
    assert_close(
        quick_jit(lambda layer, x: layer(x))(other, x)[0], expected(renamed, np.asarray(x, np.float64)), 2.0**-18
    )


def test_what_does_not_go_with_them() -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": H, "num_attention_heads": N}
    with pytest.raises(ValueError, match="qk_layernorm_across_heads=True says how qk_layernorm normalizes"):
        TransformerConfig(**sizes, qk_layernorm_across_heads=True)
    with pytest.raises(ValueError, match="qk_layernorm"):
        TransformerConfig(
            **sizes, qk_layernorm=True, qk_layernorm_across_heads=True, latent_attention=LatentAttentionOptions()
        )
