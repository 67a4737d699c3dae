"""Fields of a configuration that Megatron's vocabulary reads: parallelism, precision, attention, initializers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te._validation import log_once
from jax_te.config import (
    ExpertsConfig,
    MLATransformerConfig,
    ModelParallelConfig,
    NormalInit,
    PrecisionConfig,
    TransformerConfig,
    scaled_normal_init,
)
from jax_te.config.megatron_fields import parsed
from jax_te.config.refined import REFINED
from jax_te.layers import normal_init
from jax_te.megatron import is_layer_window_attention, recipe_from_config
from jax_te.models import GPTModel
from jax_te.recipe import autocast, recipe_from_name
from tests.support.numerics import assert_bitwise, without_type_checker

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**SIZES, **fields)


def test_defaults_are_megatrons():
    parallel, precision, made = ModelParallelConfig(), PrecisionConfig(), config()
    assert (parallel.tensor_model_parallel_size, parallel.sequence_parallel, parallel.perform_initialization) == (
        1,
        False,
        True,
    )
    assert (precision.fp8, precision.fp8_recipe, precision.fp4, precision.fp4_recipe) == (
        None,
        "delayed",
        None,
        "nvfp4",
    )
    assert (precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == (1, "most_recent")
    assert (precision.fp8_wgrad, precision.fp8_output_proj, precision.num_layers_at_start_in_bf16) == (True, False, 1)
    assert (made.softmax_type, made.qk_clip_alpha, made.qk_clip_threshold) == ("vanilla", 0.5, 100.0)
    assert made.attention_softmax_in_fp32
    assert made.window_size is None
    assert {f.name for f in dataclasses.fields(parallel)} <= {f.name for f in dataclasses.fields(made)}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"tensor_model_parallel_size": 0}, ValueError, "tensor_model_parallel_size must be an integer >= 1, got 0"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel=True needs tensor parallelism"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel must be True or False, got 1"),
        ({"context_parallel_size": 0}, ValueError, "context_parallel_size must be an integer >= 1, got 0"),
        ({"expert_model_parallel_size": 0}, ValueError, "expert_model_parallel_size must be an integer >= 1, got 0"),
        (
            {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 4},
            ValueError,
            "must be None, 1 or tensor_model_parallel_size=4, got 2",
        ),
        ({"fp16": True, "bf16": True}, ValueError, "fp16 and bf16 are both True"),
        ({"init_model_with_meta_device": True}, ValueError, r"nnx\.eval_shape"),
        ({"deterministic_mode": True}, ValueError, "--xla_gpu_exclude_nondeterministic_ops"),
        ({"tp_comm_overlap": True}, ValueError, "batch_parts=2"),
        ({"symmetric_ar_type": "ring"}, ValueError, "symmetric_ar_type must be one of None, 'two_shot', .*got 'ring'"),
        ({"quant_recipe": {}}, TypeError, "quant_recipe must be a jax_te.megatron.RecipeConfig, got dict"),
        ({"fp8": "e5m2"}, ValueError, "fp8 must be one of None, 'e4m3', 'hybrid', got 'e5m2'"),
        ({"fp8_recipe": "block"}, ValueError, "fp8_recipe must be one of 'tensorwise', 'delayed', .* got 'block'"),
        ({"fp8_margin": -1}, ValueError, "fp8_margin must be an integer >= 0, got -1"),
        ({"fp8_amax_history_len": 0}, ValueError, "fp8_amax_history_len must be an integer >= 1, got 0"),
        ({"fp8": "hybrid", "fp4": "e2m1"}, ValueError, "fp8='hybrid' and fp4='e2m1' are both given"),
        ({"fp8_param": True}, ValueError, "fp8_param=True holds kernels as fp8 quantizes them, and fp8 is None"),
        ({"fp8": "e4m3", "fp4_param": True}, ValueError, "fp4_param=True .* and fp4 is None"),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, ValueError, "'custom' needs fp8_quantizer_factory"),
        ({"fp4": "e2m1", "fp4_recipe": "custom"}, ValueError, "'custom' needs fp4_quantizer_factory"),
        ({"fp8": "e4m3", "fp8_quantizer_factory": "a.b"}, ValueError, "has no effect, because fp8_recipe is not"),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_dot_product_attention": True},
            ValueError,
            "fp8_dot_product_attention=True is for fp8_recipe 'delayed' and 'tensorwise'",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_multi_head_attention": True},
            ValueError,
            "fp8_multi_head_attention=True is for fp8_recipe",
        ),
        (
            {"fp8": "hybrid", "first_last_layers_bf16": True},
            ValueError,
            "first_last_layers_bf16 does not go with fp8_recipe 'delayed'",
        ),
        ({"num_layers_at_end_in_bf16": 3}, ValueError, r"must be an integer in \[0, num_layers = 2\], got 3"),
        ({"softmax_type": "sparse"}, ValueError, "softmax_type must be one of 'vanilla', 'off-by-one', 'learnable'"),
        ({"window_size": 128}, ValueError, "window_size must be two integers >= -1"),
        ({"window_size": (128, -2)}, ValueError, "window_size must be two integers >= -1"),
        ({"window_attn_skip_freq": 0}, ValueError, "window_attn_skip_freq must be an integer >= 1, or an integer for"),
        ({"window_attn_skip_freq": [1, 0, 1]}, ValueError, "for each of 2 layers"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be > 0"),
        ({"qk_clip_threshold": 0.0}, ValueError, "qk_clip_threshold must be > 0"),
        ({"qk_clip_alpha": 1.5}, ValueError, r"qk_clip_alpha must be in \[0, 1\]"),
        ({"cp_comm_type": "ring"}, ValueError, "cp_comm_type must be one of None, 'p2p', .* got 'ring'"),
        ({"cp_comm_type": ["p2p"]}, ValueError, "cp_comm_type has 1 entries for 2 layers"),
        ({"cp_load_balanced": "zigzag"}, TypeError, "cp_load_balanced must be True or False, got 'zigzag'"),
        ({"recompute_granularity": "some"}, ValueError, "recompute_granularity must be one of None, 'full', 'sel"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, ValueError, "'full' needs recompute_method"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            ValueError,
            "'full' needs recompute_num_layers",
        ),
        (FULL | {"recompute_num_layers": 0}, ValueError, "recompute_num_layers must be an integer >= 1, got 0"),
        (FULL | {"recompute_method": "half"}, ValueError, "recompute_method must be one of None, 'uniform', 'block'"),
        (
            FULL | {"recompute_modules": ["mhc"]},
            ValueError,
            "must be a list of some of core_attn, .*; mhc: parts that no",
        ),
        ({"recompute_modules": "mlp"}, ValueError, "must be a list of some of core_attn, .* got 'mlp'"),
        ({"recompute_modules": ["mlp"]}, ValueError, "has no effect without recompute_granularity='selective'"),
        (FULL | {"recompute_modules": ["mlp"]}, ValueError, "has no effect without recompute_granularity='selective'"),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            ValueError,
            "recompute_num_layers=1 is for recompute_granularity='full', which is 'selective'",
        ),
        ({"recompute_method": "uniform"}, ValueError, "recompute_method='uniform' is for recompute_granularity='full'"),
        ({"distribute_saved_activations": True}, ValueError, "splits the inputs that recompute_granularity='full'"),
        (
            FULL | {"distribute_saved_activations": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            ValueError,
            "distribute_saved_activations=True does not go with sequence_parallel=True",
        ),
        ({"init_method": 0.02}, TypeError, "init_method must be a function"),
        ({"init_method_std": -1.0}, ValueError, "std must be >= 0, got -1.0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], error: type[Exception], message: str):
    with without_type_checker(), pytest.raises(error, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_attn_skip_freq": 2}, "no effect without window_size"),
        ({"moe_shared_expert_intermediate_size": 64}, "no effect without num_moe_experts"),
        ({"moe_latent_size": 8}, "no effect without num_moe_experts"),
        ({"expert_model_parallel_size": 2}, "no effect without num_moe_experts"),
        ({"moe_ffn_hidden_size": 8}, "moe_ffn_hidden_size is for layers with experts"),
        ({"moe_ffn_hidden_size": 8, "moe_layer_freq": [1, 1]}, "moe_ffn_hidden_size is for layers with experts"),
        ({"moe_router_topk": -5}, "moe_router_topk must be an integer >= 1, got -5"),
        ({"moe_router_load_balancing_type": "nope"}, "moe_router_load_balancing_type must be one of .* got 'nope'"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff must be >= 0 or None"),
        ({"mtp_loss_scaling_factor": -1.0}, "mtp_loss_scaling_factor must be >= 0"),
    ],
)
def test_fields_of_what_is_off_are_refused(fields: dict[str, Any], words: str):
    """Those that stand for a part of the model, and values that no model takes."""
    with pytest.raises(ValueError, match=words):
        config(**fields)


def test_fields_that_scripts_leave_behind_are_logged_once(caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    fields = {
        "moe_layer_freq": [0, 1],
        "moe_ffn_hidden_size": 8,
        "expert_tensor_parallel_size": 1,
        "moe_router_topk": 1,
        "moe_router_bias_update_rate": 0.1,
        "moe_router_quantile_balancing_ema": 0.5,
        "moe_token_drop_policy": "position",
        "moe_z_loss_coeff": 1e-3,
        "qk_clip_alpha": 0.25,
        "qk_clip_threshold": 50.0,
        "cuda_graph_modules": ["attn", "mlp"],
        "fp8_margin": 1,
        "fp8_recipe": "blockwise",
        "fp8_wgrad": False,
        "fp8_dot_product_attention": True,
        "num_layers_at_start_in_bf16": 2,
        "mtp_loss_scaling_factor": 0.3,
        "hierarchical_context_parallel_sizes": [2, 2],
    }
    for _ in range(2):
        config(**fields, cp_comm_type="p2p", tensor_model_parallel_size=2)
    found = [record.getMessage().partition("=")[0] for record in caplog.records if "no effect" in record.getMessage()]
    assert sorted(found) == sorted(fields)
    # Where they say something, nothing is logged.
    caplog.clear()
    log_once.cache_clear()
    config(num_moe_experts=4, moe_z_loss_coeff=1e-3, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    config(hierarchical_context_parallel_sizes=[2, 2], cp_comm_type=["a2a+p2p", "p2p"])
    experts = {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "expert_model_parallel_size": 2}
    config(**experts, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    config(**experts, moe_expert_capacity_factor=1.0, moe_token_drop_policy="position")
    config(**experts, moe_router_load_balancing_type="quantile_balancing", moe_router_quantile_balancing_ema=0.5)
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    config(**experts, **bias, moe_router_bias_update_rate=0.1)
    config(qk_clip=True, qk_clip_alpha=0.25, qk_clip_threshold=50.0)
    config(cuda_graph_impl="local", cuda_graph_modules=["attn", "mlp"])
    config(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)  # what Megatron-LM's arguments say
    assert not caplog.records


@pytest.mark.parametrize(
    ("rope_type", "without_effect"),
    [
        ("rope", {"original_max_position_embeddings": 2048, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 2.0}),
        ("yarn", {"rotary_percent": 0.5}),
    ],
)
def test_fields_of_the_other_rotation_are_logged(rope_type: Any, without_effect: Any, caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    MLATransformerConfig(**SIZES, rope_type=rope_type, **without_effect)
    assert sorted(record.getMessage().partition("=")[0] for record in caplog.records) == sorted(without_effect)
    caplog.clear()
    log_once.cache_clear()
    MLATransformerConfig(**SIZES, rope_type="rope" if rope_type == "yarn" else "yarn", **without_effect)
    assert not caplog.records


def test_every_field_that_refines_another_is_one():
    """The table names fields of the configuration, each once."""
    names = [name for refined in REFINED for name in (*refined.logged.split(), *refined.refused.split())]
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert len(set(names)) == len(names)
    assert known.issuperset([*names, *(refined.name for refined in REFINED)])
    # A field of experts is in it, or named here with the reason.
    own_rule = {"num_moe_experts", "moe_ffn_hidden_size"}
    of_blocks = {"activation_func_clamp_value", "glu_linear_offset"}
    of_experts = {field.name for field in dataclasses.fields(ExpertsConfig) if field.compare}
    assert of_experts - {*names} == own_rule | of_blocks


def test_what_goes_together_is_taken():
    config(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    config(tensor_model_parallel_size=2, expert_tensor_parallel_size=2, expert_model_parallel_size=4, num_moe_experts=4)
    config(fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True, fp8_param=True)
    config(first_last_layers_bf16=True)
    lists = config(window_size=[4, 0], window_attn_skip_freq=[1, 0], cp_comm_type=["p2p", "a2a"])
    assert (lists.window_size, lists.window_attn_skip_freq, lists.cp_comm_type) == ((4, 0), (1, 0), ("p2p", "a2a"))
    hash(lists)
    assert config().recompute_modules == ("core_attn",)
    selective = config(recompute_granularity="selective", recompute_modules=["mlp", "layernorm"])
    assert selective.recompute_modules == ("mlp", "layernorm")
    assert dataclasses.replace(selective, num_layers=8).recompute_modules == ("mlp", "layernorm")
    hash(config(**FULL, distribute_saved_activations=True))


def test_initializers_follow_from_the_standard_deviation():
    made, key = config(init_method_std=0.5), jax.random.key(3)
    shape, dtype = (8, 16), jnp.float32
    assert_bitwise(made.init_method(key, shape, dtype), normal_init(0.5)(key, shape, dtype))
    assert_bitwise(made.output_layer_init_method(key, shape, dtype), scaled_normal_init(0.5, 2)(key, shape, dtype))
    assert made == config(init_method_std=0.5)
    assert hash(made) == hash(config(init_method_std=0.5))
    assert dataclasses.replace(made, num_layers=8).output_layer_init_method.std == 0.125
    given = dataclasses.replace(config(init_method=NormalInit(0.1)), init_method_std=0.3)
    assert (given.init_method, given.output_layer_init_method.std) == (NormalInit(0.1), 0.15)


def test_gpt_takes_the_initializers():
    zeros = jax.nn.initializers.zeros
    model = GPTModel(config(output_layer_init_method=zeros), vocab_size=8, max_sequence_length=4, rngs=nnx.Rngs(0))
    assert not model.layers[1].layernorm_mlp.wo_kernel[...].any()
    assert model.layers[1].layernorm_mlp.wi_kernel[...].any()


def test_gpt_refuses_what_it_does_not_follow():
    def build(**fields: Any) -> GPTModel:
        return GPTModel(config(**fields), vocab_size=8, max_sequence_length=4, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match="the models do not follow disable_parameter_transpose_cache=True"):
        build(disable_parameter_transpose_cache=True)
    with pytest.raises(ValueError, match="asks for the recipe 'current': build and call the model inside of autocast"):
        build(fp8="hybrid", fp8_recipe="tensorwise")
    with autocast(recipe_from_name("current")):
        build(fp8="hybrid", fp8_recipe="tensorwise")


def test_fields_of_delayed_scaling_are_idle_under_another_recipe(caplog: pytest.LogCaptureFixture):
    """As in Megatron, whose launch scripts give them for every recipe."""
    log_once.cache_clear()
    fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    with caplog.at_level(logging.INFO, logger="jax_te"):
        recipes = [recipe_from_config(config(**fields)) for _ in range(2)]
    assert recipes[0] == recipes[1] == recipe_from_config(config(fp8="hybrid", fp8_recipe="tensorwise"))
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [*fields][2:]


def test_a_layer_has_the_window_where_its_entry_is_not_0():
    windowed = config(window_size=[4, 0], window_attn_skip_freq=[2, 0])
    skip = windowed.window_attn_skip_freq
    assert [is_layer_window_attention((4, 0), skip, number) for number in (1, 2)] == [True, False]
    assert [windowed.has_window(number) for number in range(2)] == [True, False]


MEGATRON = Path(__file__).parent / "support" / "megatron_fields.txt"


@pytest.mark.parametrize("kind", [ModelParallelConfig, TransformerConfig])
def test_every_field_of_megatrons_is_known_with_its_default(kind: Any):
    """Stored facts: the fields of both classes and their defaults, of August 2026."""
    defaults = parsed(MEGATRON.read_text())
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    given = {name: value for name, value in defaults.items() if name not in known}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} if kind is TransformerConfig else {}
    assert len(given) > 150
    assert kind(**sizes, **given) == kind(**sizes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_model_parallel_size": 2}, "the mesh axis 'pipeline' and jax_te.config.PipelineConfig"),
        ({"moe_token_dropping": True}, "moe_expert_capacity_factor drops tokens"),
        ({"moe_grad_scale_func": abs}, "set_aux_loss_scale"),
        ({"mtp_detach_heads": True}, "reach the whole model"),
        ({"hetereogenous_dist_checkpoint": True}, "checkpoints hold each layer's arrays by name"),
        ({"multi_latent_attention": True}, "jax_te.config.MLATransformerConfig has it"),
        ({"attention_output_gate": True}, "jax_te.layers, whose DotProductAttention"),
        ({"rotary_interleaved": True}, "RotaryPositions"),
        ({"defer_embedding_wgrad_compute": True}, "deferred_vjp"),
        ({"fp32_residual_connection": True}, "compute_dtype is the dtype of activations"),
        ({"cpu_offloading": True}, "offload_gemms"),
        ({"grad_scale_func": abs}, "make_train_step"),
        ({"calculate_per_token_loss": True}, "WeightedMean"),
        ({"moe_mlp_glu_interleave_size": 32}, r"the rows of linear_fc1.weight alternate .* Reorder the weights"),
        ({"moe_shared_expert_glu_interleave_size": 32}, "the rows of linear_fc1.weight alternate"),
        ({"use_grouped_gemm_for_dense_mlp": True}, "the rows of linear_fc1.weight alternate"),
        ({"use_grouped_gemm_for_shared_expert": True}, "the rows of linear_fc1.weight alternate"),
        ({"mlp_chunks_for_training": 2}, "losses of routers"),
        ({"mlp_chunks_for_prefill": -3}, "losses of routers"),
    ],
)
def test_fields_that_would_change_numbers_say_what_jax_has(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_fields_that_only_tune_say_so_once_and_others_are_unknown(caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_te"):
        for _ in range(2):
            assert config(bias_dropout_fusion=True, persist_layer_norm=False, moe_permute_fusion=False) == config()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["bias_dropout_fusion"]


def test_a_seed_that_nothing_reads_says_what_does(caplog: pytest.LogCaptureFixture):
    """Megatron's default says nothing; options that refine one that is off have no meaning in either library."""
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_te"):
        assert config(inference_sampling_seed=42, mamba_state_dim=64, cpu_offloading_num_layers=2) == config()
        assert not caplog.records
        assert config(inference_sampling_seed=7) == config()
    assert ["generate draws tokens from the key" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, "gelu"),
        ({"bias_activation_fusion": True}, "gelu"),
        ({"bias_activation_fusion": False}, "gelu_exact"),
        ({"use_te_activation_func": False}, "gelu_exact"),
        ({"bias_activation_fusion": False, "use_te_activation_func": True}, "gelu"),
        ({"bias_activation_fusion": False, "use_transformer_engine_op_fuser": True}, "gelu"),
        ({"bias_activation_fusion": False, "activation_func": jax.nn.gelu}, "gelu_exact"),
        ({"bias_activation_fusion": False, "gated_linear_unit": True}, ("gelu_exact", "linear")),
        ({"bias_activation_fusion": True, "gated_linear_unit": True}, "geglu"),
        ({"bias_activation_fusion": False, "activation": "swiglu"}, "swiglu"),
        ({"bias_activation_fusion": False, "activation": "gelu_exact"}, "gelu_exact"),
    ],
)
def test_gelu_has_the_form_of_megatrons_kernel(fields: dict[str, Any], activation: Any):
    """``MLP.forward`` of Megatron-Core 0.19.2: its kernels have the tanh form, ``F.gelu`` has the other one."""
    assert config(**fields).activation == activation
    assert dataclasses.replace(config(), **fields).activation == activation


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu", "bias_activation_fusion": False}, "chooses its erf form, 'gelu_exact'; leave one out"),
        ({"activation": "geglu", "bias_activation_fusion": False}, "chooses its erf form"),
        ({"activation": "gelu_exact", "bias_activation_fusion": True}, "chooses the tanh form"),
        ({"activation_func": "gelu_exact", "use_te_activation_func": True}, "chooses the tanh form"),
        ({"use_te_activation_func": True, "bias_activation_fusion": True}, "exclude each other"),
        ({"use_transformer_engine_op_fuser": True, "num_moe_experts": 2}, "the other one in experts"),
        (
            {"activation": "swiglu", "activation_func_clamp_value": 1.0, "bias_activation_fusion": True},
            "kernel of 'swiglu' ignores activation_func_clamp_value",
        ),
    ],
)
def test_a_form_of_gelu_that_nothing_computes_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize("kind", [ModelParallelConfig, config])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sequence_paralel", r"no field 'sequence_paralel' \(most alike: sequence_parallel"),
        ("moe_foo_bar", "no field 'moe_foo_bar'"),
        ("inference_whatever", "no field 'inference_whatever'"),
        ("moe_permute_fusionn", r"most alike: moe_permute_fusion"),
        ("q_lora_rank", "q_lora_rank: jax_te.config.MLATransformerConfig has"),
        ("zzz", "no field 'zzz'. Correct the name, or leave it out"),
    ],
)
def test_fields_that_nobody_has_are_named(kind: Any, name: str, message: str):
    with pytest.raises(TypeError, match=message):
        kind(**{name: 3})


@pytest.mark.parametrize("name", ["glu_linear_offset", "softmax_scale", "layernorm_epsilon", "moe_z_loss_coeff"])
def test_a_number_of_a_configuration_is_finite_and_can_be_hashed(name: str):
    with without_type_checker():
        for value in (np.array(np.nan), np.float32(np.nan), np.array(np.inf)):
            with pytest.raises(ValueError, match=f"{name} must be a finite number"):
                config(**{name: value})
        for value in (np.array(0.5), jnp.float32(0.5)):
            with pytest.raises(TypeError, match=f"{name} must be a number that can be hashed, got an array"):
                config(**{name: value})
        fields = {"activation": "swiglu", name: np.float32(0.5)}
        assert hash(config(**fields)) == hash(config(**{"activation": "swiglu", name: 0.5}))


def test_a_fused_residual_needs_an_rmsnorm():
    with pytest.raises(ValueError, match="fused_residual_rmsnorm=True is for normalization='RMSNorm', got 'LayerNorm'"):
        config(fused_residual_rmsnorm=True, normalization="LayerNorm")
    assert config(fused_residual_rmsnorm=True, normalization="RMSNorm").fused_residual_rmsnorm
