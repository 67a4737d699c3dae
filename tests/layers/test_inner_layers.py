"""Layers call the layers inside of them through ``__call__``, so that a subclass or a replacement is called, too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import layers, megatron
from jax_te.config import MoEOptions, RouterOptions, TransformerConfig
from jax_te.ops import ContextParallel
from tests.support.numerics import NO_DROPOUT, draw

X = draw("x", (2, 8, 16))
EXPERTS = MoEOptions(
    router=RouterOptions(num_experts=4), latent_size=16, shared_expert_intermediate_size=16, shared_expert_gate=True
)
OPTIONS: dict[str, Any] = {"bias": False, "qk_norm_type": "RMSNorm", "normalization": "RMSNorm", **NO_DROPOUT}
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, qk_layernorm=True, num_moe_experts=4, add_bias_linear=False,
    moe_shared_expert_intermediate_size=16, moe_latent_size=16, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
LAYERS: dict[str, Any] = {
    "experts": lambda: layers.TransformerLayer(16, 32, 2, experts=EXPERTS, **OPTIONS, rngs=nnx.Rngs(0)),
    "decoder": lambda: layers.TransformerLayer(
        16, 32, 2, layer_type="decoder", output_layernorm=True, block_output_layernorm=True, **OPTIONS, rngs=nnx.Rngs(0)
    ),
    "separate projections": lambda: layers.TransformerLayer(
        16, 32, 2, fuse_qkv_params=False, **OPTIONS, rngs=nnx.Rngs(0)
    ),
    "megatron": lambda: megatron.TransformerLayer(CONFIG, rngs=nnx.Rngs(0)),
}


def subclass(kind: Any, path: str, called: list[str]) -> Any:
    """A subclass with a ``__call__`` of its own, which is what users write."""

    class Own(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(path)
            return super().__call__(*args, **kwargs)

    return Own


@pytest.mark.costly("experts", "decoder", "megatron")
@pytest.mark.parametrize("name", LAYERS)
def test_a_subclass_of_an_inner_layer_is_called(name: str) -> None:
    layer, called, inside = LAYERS[name](), [], []
    for parts, module in nnx.iter_modules(layer):
        if callable(module) and parts:
            inside.append(".".join(map(str, parts)))
            module.__class__ = subclass(type(module), inside[-1], called)
    more: dict[str, Any] = {"encoder_output": X} if name == "decoder" else {}
    nnx.eval_shape(lambda layer: layer(X, **more), layer)
    assert sorted(called) == sorted(inside)


class Plain(nnx.Module):
    """A core of a user's own, without a base: causal attention to the newest token alone."""

    num_attention_heads = num_gqa_groups = 2
    kv_channels, attention_dropout, attn_mask_type, window_size = 8, 0.0, "causal", None
    return_max_logit, context_parallel = False, ContextParallel()

    def __call__(self, query: Any, key: Any = None, value: Any = None, **options: Any) -> Any:
        assert options.keys() >= {"attention_mask", "dropout_key", "return_max_logit"}
        return query[:, :, 2] if value is None else value


def test_a_core_of_ones_own_needs_the_attributes_of_the_interface() -> None:
    layer = layers.TransformerLayer(16, 32, 2, **NO_DROPOUT, rngs=nnx.Rngs(0))
    layer.self_attention.core_attention = Plain()
    assert layer(X).shape == X.shape
    layer.set_context_parallel_group(None, cp_comm_type="all_gather")
    assert layer.self_attention.core_attention.context_parallel.cp_comm_type == "all_gather"

    class Bare(nnx.Module):
        window_size = None

    layer.self_attention.core_attention = Bare()
    with pytest.raises(TypeError, match="lacks num_attention_heads, num_gqa_groups, kv_channels, attention_dropout"):
        layer.self_attention(X)


@pytest.mark.costly
def test_a_replaced_norm_of_queries_takes_effect() -> None:
    layer = layers.MultiheadAttention(16, 2, qk_norm_type="RMSNorm", attention_dropout=0.0, rngs=nnx.Rngs(0))

    class Zeros(layers.RMSNorm):
        def __call__(self, x: Any, **kwargs: Any) -> Any:
            return jnp.zeros_like(x)

    before = layer(X)
    layer.q_norm = Zeros(8, rngs=nnx.Rngs(0))
    assert not jnp.allclose(layer(X), before)
