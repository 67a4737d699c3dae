"""A GPT with latent attention: training gradients reach all of it, and decoding is the full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, TransformerConfig
from jax_te.layers import MultiLatentAttention
from jax_te.models import GPTModel, MegatronGPTModel, RotaryPositions

SIZES = LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16)
# 36 / 8 heads is no head size: the latents' sizes say what heads have.
CONFIG = {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 8, "normalization": "RMSNorm"}


def build() -> GPTModel:
    config = TransformerConfig(**CONFIG, add_bias_linear=False, latent_attention=SIZES, init_method_std=0.2)
    rotary = RotaryPositions(interleaved=True)
    return GPTModel(config, vocab_size=50, max_sequence_length=16, position_embedding_type=rotary, rngs=nnx.Rngs(0))


@pytest.mark.costly
def test_decoding_is_the_full_forward() -> None:
    model, tokens = build(), jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    assert all(isinstance(layer.self_attention, MultiLatentAttention) for layer in model.layers)
    full = model(tokens)
    cache, parts = model.init_cache(2, 6), []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        part, cache = model(tokens[:, start:stop], cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=1e-4, atol=1e-5 * float(jnp.abs(full).max()))


def test_gradients_reach_every_parameter() -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    grads = nnx.grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(build())
    for path, grad in nnx.to_flat_state(nnx.state(grads, nnx.Param)):
        assert np.any(grad[...]), path


@pytest.mark.parametrize("option", [{"num_query_groups": 2}, {"qk_layernorm": True}, {"add_qkv_bias": True}])
def test_options_of_other_attention_are_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="latent_attention is set"):
        TransformerConfig(**CONFIG, latent_attention=SIZES, **option)


def test_layers_of_megatrons_names_refuse_it() -> None:
    config = TransformerConfig(**CONFIG, latent_attention=SIZES)
    with pytest.raises(ValueError, match="latent_attention"):
        MegatronGPTModel(config, transformer_layer_spec=None, vocab_size=50, max_sequence_length=16, rngs=nnx.Rngs(0))
