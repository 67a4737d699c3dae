"""Megatron's classes of experts: names, configuration, state dicts, rules; tests/moe compares their numbers."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te._validation import log_once
from jax_te.config import TransformerConfig
from jax_te.megatron import (
    MLP,
    Float16Module,
    MoELayer,
    RecipeConfig,
    SharedExpertMLP,
    TopKRouter,
    TransformerLayer,
    will_execute_quantized,
)
from jax_te.recipe import Float8CurrentScaling, autocast
from tests.support.numerics import TOLERANCE, assert_close, draw, quick_jit, without_type_checker

H, E = 16, 4
X = draw("x", (2, 6, H))


def config(**fields):
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "ffn_hidden_size": 32}
    return TransformerConfig(**sizes | {"num_moe_experts": E, "add_bias_linear": False} | fields)


SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}


@pytest.mark.costly
def test_a_router_gives_megatrons_pair():
    router = TopKRouter(config(moe_expert_capacity_factor=0.5), rngs=nnx.Rngs(0))
    probs, routing_map = router(X)
    routing = router(X, return_routing=True)
    assert probs.shape == routing_map.shape == (12, E)
    assert routing_map.dtype == bool
    kept, experts = np.asarray(routing.kept).reshape(12, 2), np.asarray(routing.experts).reshape(12, 2)
    for t in range(12):
        assert set(np.flatnonzero(routing_map[t])) == set(experts[t][kept[t]])
        for slot in range(2):
            want = float(routing.probs.reshape(12, 2)[t, slot]) * kept[t, slot]
            assert float(probs[t, experts[t, slot]]) == want


@pytest.mark.slow
def test_names_of_a_state_dict_are_megatrons():
    layer = MoELayer(config(moe_latent_size=8, **SHARED), rngs=nnx.Rngs(0))
    shapes = {name: array.shape for name, array in layer.state_dict().items()}
    assert shapes == {
        **{f"experts.linear_fc1.weight{i}": (32, 8) for i in range(E)},
        **{f"experts.linear_fc2.weight{i}": (8, 32) for i in range(E)},
        "fc1_latent_proj.weight": (8, H),
        "fc2_latent_proj.weight": (H, 8),
        "router.weight": (E, H),
        "shared_experts.gate_weight": (1, H),
        "shared_experts.linear_fc1.weight": (32, H),
        "shared_experts.linear_fc2.weight": (H, 32),
    }
    biased = config(add_bias_linear=True, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    one, two = (MoELayer(biased, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    assert {"router.bias", "router.expert_bias", "experts.linear_fc2.bias3"} <= one.state_dict().keys()
    one.router.expert_bias.set_value(jnp.arange(4.0))
    two.load_state_dict(one.state_dict())
    call = quick_jit(lambda layer: layer(X)[0])
    np.testing.assert_array_equal(call(one), call(two))


def test_states_of_a_router_stay_in_fp32():
    biased = config(bf16=True, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    module = Float16Module(biased, MoELayer(biased, rngs=nnx.Rngs(0)))
    assert module.module.router.expert_bias.dtype == jnp.float32
    assert module.module.router.kernel.dtype == jnp.bfloat16


def test_rules_reach_the_experts():
    rules = RecipeConfig.from_config_dict(
        {
            "configs": {
                "off": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
                "fp8": {
                    "transformer_engine_config_type": "TEQuantizationParams",
                    "training_recipe": {"fp8_quantization_recipe": "tensorwise"},
                },
            },
            "matchers": {
                "experts": {"type": "glob", "pattern": "*.experts.linear_fc1", "config": "off", "enabled": True},
                "all": {"type": "glob", "pattern": "*", "config": "fp8", "enabled": True},
            },
        }
    )
    layer = MoELayer(config(quant_recipe=rules, **SHARED), name="decoder.layers.0.mlp", rngs=nnx.Rngs(0))
    quantized = [
        will_execute_quantized(linear, True)
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2, layer.shared_experts.linear_fc1)
    ]
    assert quantized == [False, True, True]


def test_a_choice_is_replayed_where_the_configuration_says_so():
    replaying = TopKRouter(config(moe_enable_routing_replay=True), rngs=nnx.Rngs(0))
    own = replaying(X, return_routing=True).experts
    other = (own + 1) % E
    replaying.set_target_indices(other)
    np.testing.assert_array_equal(replaying(X, return_routing=True).experts, other)
    replaying.clear_indices()
    np.testing.assert_array_equal(replaying(X, return_routing=True).experts, own)
    with pytest.raises(ValueError, match="moe_enable_routing_replay=True"):
        TopKRouter(config(), rngs=nnx.Rngs(0)).set_target_indices(other)


@pytest.mark.parametrize(
    ("indices", "error", "match"),
    [
        (jnp.zeros((2, 8, 3), jnp.int32), ValueError, r"topk_indices must be \[2, 8, 2\], got shape \(2, 8, 3\)"),
        (jnp.zeros(2, jnp.int32), ValueError, r"topk_indices must be \[b, s, 2\] or \[s, 2\]"),
        (jnp.zeros((2, 8, 2)), TypeError, "topk_indices must be integers"),
        (jnp.full((2, 8, 2), E), ValueError, f"topk_indices must be numbers from 0 to num_experts - 1 = {E - 1}"),
    ],
)
def test_a_choice_that_no_call_could_take_is_refused_when_it_is_set(indices, error, match):
    router = TopKRouter(config(moe_enable_routing_replay=True), rngs=nnx.Rngs(0))
    with without_type_checker(), pytest.raises(error, match=match):
        router.set_target_indices(indices)
    assert router.replayed is None


def test_limits_of_the_activation_are_in_every_block():
    """What gpt-oss computes, in the dense block and in the experts."""
    limited = {"activation_func": "quick_gelu", "gated_linear_unit": True}
    limited |= {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}
    mlp = MLP(config(num_moe_experts=None, **limited), rngs=nnx.Rngs(0))
    x = 4.0 * X
    normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    a = jnp.einsum("bsh,hnf->bsnf", normed, mlp.linear_fc1.kernel[...], precision="highest")
    gate, linear = jnp.minimum(a[..., 0, :], 0.5), jnp.clip(a[..., 1, :], -0.5, 0.5)
    z = gate * jax.nn.sigmoid(1.702 * gate) * (linear + 1.0)
    assert_close(mlp(x)[0], jnp.matmul(z, mlp.linear_fc2.kernel[...], precision="highest"), 8 * TOLERANCE["float32"])
    with pytest.raises(ValueError, match="is for a gated activation"):
        config(activation_func_clamp_value=0.5)


@pytest.mark.slow
def test_fp8_of_all_parts():
    with autocast(Float8CurrentScaling()):
        layer = MoELayer(config(moe_latent_size=16, **SHARED), rngs=nnx.Rngs(0))
        low = layer(X)[0]
    high = layer(X)[0]
    assert 0.0 < np.linalg.norm(low - high) < 0.2 * np.linalg.norm(high)


def test_weight_gradients_that_wait_are_elsewhere():
    MoELayer(config(), rngs=nnx.Rngs(0)).backward_dw()
    with pytest.raises(RuntimeError, match="deferred_vjp"):
        MoELayer(config(delay_wgrad_compute=True), rngs=nnx.Rngs(0)).backward_dw()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_router_topk": 5}, "moe_router_topk 5 is more than the num_moe_experts 4"),
        ({"moe_router_topk": 1}, "moe_router_pre_softmax=True"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "moe_router_num_groups 3 does not divide"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_score_function"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0 drops every token"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_expert_capacity_factor"),
        ({"moe_apply_probs_on_input": True}, "moe_router_topk is 2"),
        ({"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1}, "a coefficient for each"),
        ({"add_bias_linear": True, **SHARED}, "add_bias_linear=True with moe_shared_expert_intermediate_size"),
        ({"moe_layer_freq": [1]}, "for each of 2 layers"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be an integer >= 1"),
        ({"num_moe_experts": None, "moe_ffn_hidden_size": 8}, "set num_moe_experts"),
        ({"moe_router_topk_limited_devices": 2}, "moe_router_group_topk 2 is more than the moe_router_num_groups 1"),
        ({"moe_layer_recompute": True, "recompute_granularity": "full"}, "leave one out"),
        ({"moe_expert_rank_capacity_factor": 0.0}, "moe_expert_rank_capacity_factor"),
    ],
)
def test_configurations_that_do_not_fit(fields, words):
    with pytest.raises(ValueError, match=words):
        config(**fields)


def test_fields_that_are_filled_in():
    made = config(moe_layer_recompute=True, moe_router_load_balancing_type=["aux_loss"], moe_aux_loss_coeff=[0.1])
    assert (made.recompute_granularity, made.recompute_modules) == ("selective", ("moe",))
    assert made.moe_ffn_hidden_size == 32
    assert hash(made) == hash(config(moe_layer_recompute=True, moe_router_load_balancing_type=("aux_loss",),
                                     moe_aux_loss_coeff=(0.1,)))  # fmt: skip
    assert [config(moe_layer_freq=freq).has_experts(1) for freq in (1, 2, (1, 0), (0, 1))] == [True, False, False, True]


def test_rows_of_tokens_that_megatron_adds_are_told(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_te"):
        assert config(moe_router_padding_for_quantization=True) == config()
    assert ["numbers differ from Megatron's" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.slow
def test_the_layers_that_a_frequency_names_have_experts():
    """Behind a norm of their own, as `MoELayer` computes them."""
    frequency = config(num_layers=2, moe_layer_freq=[0, 1], hidden_dropout=0.0, attention_dropout=0.0)
    dense, layer = (TransformerLayer(frequency, number, rngs=nnx.Rngs(0)) for number in (1, 2))
    assert isinstance(dense.mlp, MLP)
    assert dense.pre_mlp_layernorm is None
    assert isinstance(layer.mlp, MoELayer)
    x = jax.random.normal(jax.random.key(1), (2, 4, frequency.hidden_size))
    attended = x + layer.self_attention(x)[0]
    expected = attended + layer.mlp(layer.pre_mlp_layernorm(attended))[0]
    np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_what_there_is_not():
    with pytest.raises(ValueError, match="is_mtp_layer"):
        MoELayer(config(), is_mtp_layer=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_moe_experts is None"):
        MoELayer(config(num_moe_experts=None), rngs=nnx.Rngs(0))
    with pytest.raises(AssertionError, match="add_bias_linear=False"):
        SharedExpertMLP(config(add_bias_linear=True), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="moe_shared_expert_intermediate_size is None"):
        SharedExpertMLP(config(), rngs=nnx.Rngs(0))
