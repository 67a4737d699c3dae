"""A GPT with latent attention: training gradients reach all of it, and decoding is the full forward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, MLATransformerConfig, TransformerConfig
from jax_te.layers import MultiLatentAttention, YarnScaling
from jax_te.megatron import RecipeConfig, apply_quantization_config
from jax_te.models import BertModel, GPTModel, MegatronGPTModel, RotaryPositions

SIZES = LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16)
# 36 / 8 heads is no head size: the latents' sizes say what heads have.
CONFIG: dict[str, Any] = {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 8, "normalization": "RMSNorm"}


@jax.jit
def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def build() -> GPTModel:
    config = TransformerConfig(**CONFIG, add_bias_linear=False, latent_attention=SIZES, init_method_std=0.2)
    rotary = RotaryPositions(interleaved=True)
    return GPTModel(config, vocab_size=50, max_sequence_length=16, position_embedding_type=rotary, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_decoding_is_the_full_forward() -> None:
    model, tokens = build(), jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    assert all(isinstance(layer.self_attention, MultiLatentAttention) for layer in model.layers)
    full = call(model, tokens)
    cache, parts = model.init_cache(2, 6), []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        part, cache = call(model, tokens[:, start:stop], cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=1e-4, atol=1e-5 * float(jnp.abs(full).max()))


@pytest.mark.slow
def test_gradients_reach_every_parameter() -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    grads = nnx.jit(nnx.grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:])))(build())
    for path, grad in nnx.to_flat_state(nnx.state(grads, nnx.Param)):
        assert np.any(grad[...]), path


@pytest.mark.parametrize("option", [{"num_query_groups": 2}, {"qk_layernorm": True}, {"add_qkv_bias": True}])
def test_options_of_other_attention_are_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="latent_attention is set"):
        TransformerConfig(**CONFIG, latent_attention=SIZES, **option)


MLA: dict[str, Any] = {
    **CONFIG,
    **{field: getattr(SIZES, field) for field in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim")},
    "v_head_dim": SIZES.v_head_dim,
    "qk_layernorm": True,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale_all_dim": 0.7,
    "init_method_std": 0.2,
}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=8, mscale_all_dim=0.7)


@pytest.mark.slow
@pytest.mark.wide("{'rope_type': 'rope', 'rotary_percent': 0.5}")
@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None}, {"rope_type": "rope", "rotary_percent": 0.5}], ids=str)
def test_megatrons_model_and_fields_are_gpt_with_the_same_latents(fields: dict) -> None:
    config = MLATransformerConfig(**MLA | fields)
    scale = YARN.score_factor * SIZES.head_channels**-0.5
    assert config.softmax_scale == pytest.approx(scale, rel=1e-12)
    sizes = dataclasses.replace(SIZES, q_lora_rank=config.q_lora_rank)
    plain = TransformerConfig(**CONFIG, latent_attention=sizes, softmax_scale=scale, init_method_std=0.2)
    rope = config.rope_type == "rope"
    rotary = RotaryPositions(percent=config.rotary_percent, scaling=None if rope else YARN, interleaved=True)
    options = {"vocab_size": 50, "max_sequence_length": 16}
    expected = GPTModel(
        plain, **options, position_embedding_type=rotary, share_embeddings_and_output_weights=False, rngs=nnx.Rngs(0)
    )
    megatrons = MegatronGPTModel(config, None, **options, position_embedding_type="rope", rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    full = call(expected, tokens)
    # Angles are in fp32 in both; the GEMMs are the same.
    np.testing.assert_allclose(call(megatrons, tokens), full, rtol=1e-5, atol=1e-6 * float(jnp.abs(full).max()))
    cache, parts = megatrons.init_cache(2, 6), []
    for start, stop in ((0, 4), (4, 6)):
        part, cache = call(megatrons, tokens[:, start:stop], cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=1e-4, atol=1e-5 * float(jnp.abs(full).max()))
    # A GPTModel reads the same fields, and a layer by itself needs no angles.
    own = GPTModel(config, **options, position_embedding_type="none", rngs=nnx.Rngs(0))
    assert own.rotary == megatrons.rotary == rotary
    x, angles = (
        jax.random.normal(jax.random.key(2), (2, 6, 36)),
        megatrons.embed_inputs(tokens).arrays["rotary_pos_emb"],
    )
    layer = megatrons.layers[0]
    np.testing.assert_array_equal(call(layer, x)[0], call(layer, x, rotary_pos_emb=angles)[0])


def test_a_contradicting_rotation_is_refused() -> None:
    config = MLATransformerConfig(**MLA)
    with pytest.raises(ValueError, match="contradicts its MLATransformerConfig"):
        MegatronGPTModel(config, None, 50, 16, position_embedding_type="rope", rotary_base=500.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="latent_attention"):
        BertModel(config, vocab_size=50, max_sequence_length=16, rngs=nnx.Rngs(0))


@pytest.mark.costly
def test_rotary_options_of_a_model_are_those_of_its_configuration() -> None:
    """Megatron-LM gives its model flags that may be their defaults; a `RotaryPositions` was written on purpose."""
    config = MLATransformerConfig(**MLA | {"num_layers": 1, "rotary_base": 50000.0})
    sizes = {"vocab_size": 50, "max_sequence_length": 16}
    own = GPTModel(config, **sizes, position_embedding_type="rope", rngs=nnx.Rngs(0)).rotary
    assert own is not None
    assert own.base == 50000.0
    assert GPTModel(config, **sizes, position_embedding_type=own, rngs=nnx.Rngs(0)).rotary == own
    for other in (RotaryPositions(), RotaryPositions(base=50000.0)):
        with pytest.raises(ValueError, match="contradicts its MLATransformerConfig"):
            GPTModel(config, **sizes, position_embedding_type=other, rngs=nnx.Rngs(0))
    for flags in ({}, {"rotary_base": 50000.0}):
        model = MegatronGPTModel(config, None, **sizes, position_embedding_type="rope", **flags, rngs=nnx.Rngs(0))
        assert model.rotary == own


def test_rules_have_megatrons_names_for_both_models() -> None:
    config = MLATransformerConfig(**MLA | {"num_layers": 1})
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    rule = {"enabled": True, "type": "glob", "pattern": "*linear_kv_*_proj", "config": "high"}
    rules = RecipeConfig.from_config_dict({"configs": {"high": payload}, "matchers": {"latents": rule}})
    options = {"vocab_size": 50, "max_sequence_length": 16, "rngs": nnx.Rngs(0)}
    for model, names in (
        (GPTModel(config, **options), ["kv_down", "kv_up"]),
        (MegatronGPTModel(config, None, **options), ["linear_kv_down_proj", "linear_kv_up_proj"]),
    ):
        report = apply_quantization_config(model, rules)
        matched = [module.path.rpartition(".")[2] for module in report.modules if module.matcher == "latents"]
        assert sorted(matched) == names
