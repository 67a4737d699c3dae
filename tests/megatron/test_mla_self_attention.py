"""MLASelfAttention: Megatron's names and numbers, its configuration, packed rows, and meshes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, MLATransformerConfig, ParallelConfig, TransformerConfig
from jax_te.layers import PackedSeqParams, clip_qk
from jax_te.megatron import MLASelfAttention, SelfAttention, TransformerLayer
from jax_te.ops import reorder_to_zigzag
from jax_te.sharding import make_mesh
from tests.support import latent
from tests.support.meshes import shard

H, N, S = 16, 4, 8
FIELDS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": H,
    "num_attention_heads": N,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 16,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 0.7,
    "init_method_std": 0.3,
}


def config_of(**fields: Any) -> MLATransformerConfig:
    return MLATransformerConfig(**FIELDS | fields)


def inputs(b: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(3), (b, S, H))


def expected(attention: MLASelfAttention, x: Any) -> np.ndarray:
    """NumPy's output for the weights of a state dict of Megatron's, ``[out, in]``."""
    names = {
        "linear_q_proj.weight": "query.kernel",
        "linear_q_down_proj.weight": "q_down.kernel",
        "linear_q_up_proj.weight": "q_up.kernel",
        "linear_q_up_proj.layer_norm_weight": "q_up.scale",
        "linear_kv_down_proj.weight": "kv_down.kernel",
        "linear_kv_up_proj.weight": "kv_up.kernel",
        "linear_kv_up_proj.layer_norm_weight": "kv_up.scale",
        "linear_proj.weight": "proj.kernel",
    }
    weights = {names[name]: np.asarray(array, np.float64).T for name, array in attention.state_dict().items()}
    config: Any = attention.config
    rope = latent.yarn(np.arange(x.shape[1]), 4, 10000.0, 4.0, 16, config.mscale, config.mscale_all_dim)
    return latent.attention(weights, np.asarray(x, np.float64), config.latent_attention, N, rope)


@pytest.mark.costly(slow=("{}", "{'qk_layernorm': False}"))
@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None}, {"qk_layernorm": False}], ids=str)
def test_names_and_numbers_are_megatrons(fields: dict[str, Any]) -> None:
    attention = MLASelfAttention(config_of(**fields), rngs=nnx.Rngs(0))
    y, bias = attention(inputs())
    assert bias is None
    np.testing.assert_allclose(y, expected(attention, inputs()), rtol=1e-4, atol=1e-5)


@pytest.mark.costly
def test_a_packed_row_rotates_each_sequence_from_0() -> None:
    attention = MLASelfAttention(config_of(), rngs=nnx.Rngs(0))
    x = inputs(1)
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, S]))
    y, _ = attention(x, packed_seq_params=packed, attn_mask_type="padding_causal")
    parts = [expected(attention, x[:, :3]), expected(attention, x[:, 3:])]
    np.testing.assert_allclose(y, np.concatenate(parts, axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_layer_has_the_norm_in_front_under_megatrons_name() -> None:
    layer = TransformerLayer(config_of(), rngs=nnx.Rngs(0))
    names = set(layer.state_dict())
    assert {"input_layernorm.weight", "self_attention.linear_q_down_proj.weight"} <= names
    assert not any("linear_qkv" in name for name in names)
    # Megatron's norm scales its input: that of the whole layer is then different.
    x = inputs()
    (attended, _), plain = layer.self_attention(layer.input_layernorm(x)), layer(x)[0]
    np.testing.assert_allclose(plain, layer.mlp(x + attended)[0] + x + attended, rtol=1e-5, atol=1e-6)
    other = TransformerLayer(config_of(), rngs=nnx.Rngs(1))
    other.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other(x)[0], plain)


@pytest.mark.costly
def test_clipping_reaches_megatrons_projections() -> None:
    attention = MLASelfAttention(config_of(), rngs=nnx.Rngs(0))

    def logits() -> jax.Array:
        return attention(inputs(), return_max_logit=True).max_logit

    before = logits()
    threshold = float(jnp.sort(before)[1])
    clip_qk(attention, before, threshold=threshold, alpha=0.5)
    np.testing.assert_allclose(logits(), jnp.minimum(before, threshold), rtol=1e-5)


def test_fields_have_megatrons_defaults_and_follow_each_other() -> None:
    config = MLATransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=N)
    assert config == MLATransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=N,
        normalization="RMSNorm",
        multi_latent_attention=True,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="yarn",
        rotary_base=10000.0,
        rotary_percent=1.0,
        rotary_scaling_factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=False,
        mla_down_proj_fusion=False,
    )
    assert config.latent_attention == LatentAttentionOptions(latent_layernorm=False)
    changed = dataclasses.replace(config, kv_lora_rank=8, qk_head_dim=64, qk_layernorm=True)
    assert changed.latent_attention == LatentAttentionOptions(kv_lora_rank=8, qk_head_dim=64)
    assert (changed.kv_channels, changed.softmax_scale) == (128, pytest.approx(128**-0.5))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"multi_latent_attention": False}, ValueError, "take TransformerConfig"),
        ({"mla_down_proj_fusion": True}, ValueError, "separate layers"),
        ({"rope_type": "linear"}, ValueError, "rope_type"),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank"),
        ({"num_query_groups": 2}, ValueError, "latent_attention is set"),
        ({"softmax_scale": 1.0}, TypeError, "computes softmax_scale from its other fields"),
    ],
    ids=str,
)
def test_other_values_are_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(**fields)


def test_layers_of_one_kind_refuse_the_other() -> None:
    plain = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=N)
    with pytest.raises(ValueError, match="takes an MLATransformerConfig"):
        MLASelfAttention(plain, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"take jax_te\.megatron\.MLASelfAttention"):
        SelfAttention(config_of(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="self-attention alone"):
        TransformerLayer(config_of(), layer_type="decoder", rngs=nnx.Rngs(0))


MESHES = [
    ({"fsdp": 2, "tensor": 4}, {}),
    ({"data": 2, "tensor": 4}, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    ({"context": 2, "data": 4}, {"cp_load_balanced": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "fields"), MESHES, ids=lambda case: "-".join(case) or "plain")
def test_a_mesh_computes_what_one_device_does(axes: dict[str, int], fields: dict[str, Any]) -> None:
    @nnx.jit
    def run(layer: Any, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda layer, x: jnp.mean(layer(x)[0] ** 2), argnums=(0, 1))(layer, x)

    x = inputs(8)
    loss, (grads, dx) = run(TransformerLayer(config_of(), rngs=nnx.Rngs(1)), x)
    with jax.set_mesh(make_mesh(ParallelConfig(**axes))):
        order: Any = reorder_to_zigzag if "cp_load_balanced" in fields else lambda x: x
        loss_on_mesh, grads_on_mesh = run(shard(TransformerLayer(config_of(**fields), rngs=nnx.Rngs(1))), order(x))
        dx = order(dx)
    np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-5)
    for actual, wanted in zip(jax.tree.leaves(grads_on_mesh), jax.tree.leaves((grads, dx)), strict=True):
        actual, wanted = np.asarray(actual), np.asarray(wanted)
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
