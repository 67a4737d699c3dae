"""Every field of a configuration: another value than the default changes the model, is a listed hint, or is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te._validation import log_once
from jax_te.config import LatentAttentionOptions, MLATransformerConfig, ParallelConfig, TransformerConfig
from jax_te.megatron import (
    AttnMaskType,
    Float16Module,
    GlobMatcher,
    MegatronModule,
    RecipeConfig,
    TEDotProductAttention,
    TELinear,
    TENorm,
    TopKRouter,
    TransformerLayer,
    recipe_from_config,
)
from jax_te.models import GPTModel, MegatronGPTModel
from jax_te.recipe import autocast
from jax_te.sharding import make_mesh
from jax_te.training import abstract_train_state, make_train_step

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
BATCH, SEQUENCE, VOCABULARY = 4, 8, 32
Fields = dict[str, Any]
Look = Callable[[TransformerConfig], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """What is seen of a field: what ``look`` gives of a configuration with it, beside one without.

    Args:
        value: value of the field.
        given: other fields, which both configurations have.
        beside: other fields, without which the value is refused.
        look: what a configuration does.
        mesh: sizes of the mesh on which it is looked at.
    """

    value: Any
    given: Fields = dataclasses.field(default_factory=dict)
    look: Look | None = None
    mesh: str | None = None
    beside: Fields = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Hint:
    """A value without effect, which is logged; tests/test_hints.py compares the list with that of docs/parity.md."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Refused:
    """A value that is refused when the configuration is built, or where ``look`` builds a model of it."""

    value: Any
    message: str
    given: Fields = dataclasses.field(default_factory=dict)
    look: Look | None = None


# What a configuration does.


@contextlib.contextmanager
def on_mesh(sizes: str | None) -> Iterator[None]:
    with jax.set_mesh(make_mesh(ParallelConfig.parse(sizes))) if sizes else contextlib.nullcontext():
        yield


def step_of(model_class: Any, config: TransformerConfig) -> str:
    """The program of a train step, with its inputs and outputs: parameters, state, dtypes, shardings, metrics."""
    build = functools.partial(build_model, model_class, config)
    tx = optax.sgd(0.1)
    with autocast(recipe_from_config(config)):
        state = abstract_train_state(lambda rngs: build(rngs=rngs), tx, fp8_param=config.fp8_param or config.fp4_param)
        tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
        text = make_train_step(loss, tx).lower(state, tokens).as_text()
    return re.sub(r"loc\(.*?\)|#loc.*", "", text)


def build_model(model_class: Any, config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    first: tuple[Any, ...] = (config, None) if model_class is MegatronGPTModel else (config,)
    return model_class(*first, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, **POSITIONS, rngs=rngs)


POSITIONS = {"position_embedding_type": "rope"}


def loss(model: Any, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
    return model.loss(tokens, tokens, dropout_key=key)


def step(config: TransformerConfig) -> str:
    return step_of(GPTModel, config)


def megatron_step(config: TransformerConfig) -> str:
    return step_of(MegatronGPTModel, config)


def initial(config: TransformerConfig) -> list[float]:
    """Sums of the squares of the initial parameters."""
    model = build_model(GPTModel, config, nnx.Rngs(0))
    return [float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """The fields: one that is another name of a field, or from which others follow, changes those."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.compare}


def recipe(config: TransformerConfig) -> Any:
    return recipe_from_config(config)


def captured(config: TransformerConfig) -> int:
    """Number of captured graphs after a call."""
    layer = TransformerLayer(config, rngs=nnx.Rngs(0))
    layer(jnp.ones((1, SEQUENCE, config.hidden_size)))
    return len(layer.cuda_graphs)


def clipped(config: TransformerConfig) -> list[float]:
    """Norms of the kernels after clipping by logits of 200."""
    model = build_model(GPTModel, config, nnx.Rngs(0))
    model.clip_qk(jnp.full((config.num_layers, config.num_attention_heads), 200.0))
    return [float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def attention_results(config: TransformerConfig) -> Any:
    """Shapes of what Megatron's attention core returns."""
    core, heads = TEDotProductAttention(config, 1, AttnMaskType.causal, "self"), jnp.ones((1, SEQUENCE, 4, 8))
    return jax.tree.map(jnp.shape, jax.eval_shape(core, heads, heads, heads))


def norm_results(config: TransformerConfig) -> Any:
    """Shapes of what Megatron's norm in front of a residual connection returns."""
    layer = TENorm(config, config.hidden_size, has_residual=True)
    return jax.tree.map(jnp.shape, layer(jnp.ones((1, SEQUENCE, config.hidden_size))))


def replays(config: TransformerConfig) -> bool:
    """Whether a router of Megatron's takes a choice of experts that was set."""
    router = TopKRouter(config, rngs=nnx.Rngs(0))
    with contextlib.suppress(ValueError):
        router.set_target_indices(jnp.zeros((1, SEQUENCE, config.moe_router_topk), jnp.int32))
    return router.replayed is not None


def cast(config: TransformerConfig) -> Any:
    """Dtype to which Megatron's wrapper of a model casts; None: it refuses to wrap it."""
    with contextlib.suppress(ValueError):
        return Float16Module(config, build_model(GPTModel, config, nnx.Rngs(0))).dtype
    return None


def linear(config: TransformerConfig) -> TELinear:
    return TELinear(
        32,
        32,
        parallel_mode=None,
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
        is_expert=False,
        rngs=nnx.Rngs(0),
    )


def linear_kernel(config: TransformerConfig) -> float:
    """The norm of the kernel that a linear layer of Megatron's begins with."""
    return float(jnp.sum(jnp.square(linear(config).kernel[...])))


def waits_for_gradients(config: TransformerConfig) -> bool:
    """Whether a linear layer of Megatron's says that its weight gradients are computed apart."""
    try:
        linear(config).backward_dw()
    except RuntimeError:
        return True
    return False


class OneLayer(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.linear = linear(config)


def begins_microbatches(config: TransformerConfig) -> bool | None:
    """What `set_is_first_microbatch` tells a layer."""
    with autocast(recipe_from_config(config)):
        module = OneLayer(config)
        module.linear.is_first_microbatch = None
        module.set_is_first_microbatch()
    return module.linear.is_first_microbatch


def accepts_mesh(config: TransformerConfig) -> bool:
    """Whether a model is built on a mesh of this size of each axis."""
    try:
        step(config)
    except ValueError:
        return False
    return True


def own_quantizer(role: str) -> Any:
    raise NotImplementedError


# The fields, as the classes list them.

FULL: Fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS: Fields = {"num_moe_experts": 8, "moe_router_topk": 2, "add_bias_linear": False}
SIGMOID: Fields = EXPERTS | {"moe_router_score_function": "sigmoid"}
AUX: Fields = EXPERTS | {"moe_aux_loss_coeff": 0.01}
CAPACITY: Fields = EXPERTS | {"moe_expert_capacity_factor": 1.0}
SHARED: Fields = EXPERTS | {"moe_shared_expert_intermediate_size": 16}
GROUPS: Fields = EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
ONE_EACH: Fields = SIGMOID | {"moe_router_topk": 1}
SWIGLU: Fields = {"activation": "swiglu"}
WINDOW: Fields = {"window_size": (2, 0)}
CLIP: Fields = {"qk_clip": True}
FP8: Fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED: Fields = {"fp8": "hybrid"}
HISTORY: Fields = DELAYED | {"fp8_amax_history_len": 4}
FP4: Fields = {"fp4": "e2m1"}
FACTORY = "jax_te.quantize.quantizer_for"
OWN_FP8: Fields = {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": FACTORY}
OWN_FP4: Fields = {"fp4": "e2m1", "fp4_recipe": "custom", "fp4_quantizer_factory": FACTORY}
OTHER_FACTORY = "tests.test_config_matrix.own_quantizer"
BF16: Fields = FP8 | {"num_layers": 3, "first_last_layers_bf16": True}
TENSOR: Fields = {"tensor_model_parallel_size": 2}
SPLIT_EXPERTS: Fields = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
DEPTHS: Fields = {"mtp_num_layers": 2}
TWO_LEVELS: Fields = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
# The second layer of Megatron's MLP is quantized.
RULES = RecipeConfig(
    [GlobMatcher("*linear_fc2", "own")],
    {
        "own": {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {"fp8_quantization_recipe": "tensorwise", "override_nonquantized_autocast": True},
        }
    },
)

MULTI_HEAD: dict[str, Row | Hint | Refused] = {
    "cuda_graph_impl": Row("local", look=captured),
    "cuda_graph_modules": Refused(["attn"], "which all are the whole layer"),
    "cuda_graph_scope": Row("full_iteration", look=fields_of),
    "enable_cuda_graph": Row(True, look=fields_of),
    "external_cuda_graph": Row(True, look=fields_of),
    "cuda_graph_warmup_steps": Hint(1),
    "cuda_graph_use_single_mempool": Hint(False),
    "cuda_graph_retain_backward_graph": Hint(True),
    "recompute_granularity": Row("selective"),
    "recompute_method": Row("block", FULL),
    "recompute_num_layers": Row(2, FULL),
    "recompute_modules": Row(["mlp"], {"recompute_granularity": "selective"}),
    "distribute_saved_activations": Row(True, FULL | TENSOR, mesh="tensor=2"),
    "num_moe_experts": Row(8),
    "moe_layer_freq": Row(2, EXPERTS),
    "moe_ffn_hidden_size": Row(16, EXPERTS),
    "moe_router_topk": Row(3, EXPERTS),
    "moe_router_load_balancing_type": Row("seq_aux_loss", AUX),
    "moe_router_score_function": Row("sigmoid", EXPERTS),
    "moe_router_pre_softmax": Row(True, EXPERTS),
    "moe_router_topk_scaling_factor": Row(2.0, EXPERTS),
    "moe_router_num_groups": Row(2, GROUPS),
    "moe_router_group_topk": Row(1, GROUPS | {"moe_router_num_groups": 2}),
    "moe_router_group_score_topk": Row(2, GROUPS),
    "moe_router_topk_limited_devices": Row(1, EXPERTS | {"expert_model_parallel_size": 2}, mesh="expert=2"),
    "moe_router_dtype": Row("fp32", EXPERTS | {"compute_dtype": "bfloat16"}),
    "moe_router_enable_expert_bias": Row(True, SIGMOID),
    "moe_router_bias_update_rate": Row(0.01, SIGMOID | {"moe_router_enable_expert_bias": True}),
    "moe_router_quantile_balancing_ema": Row(0.5, EXPERTS | {"moe_router_load_balancing_type": "quantile_balancing"}),
    "moe_router_force_load_balancing": Row(True, EXPERTS),
    "moe_router_force_biased": Row(1.0, EXPERTS),
    "moe_enable_routing_replay": Row(True, EXPERTS, replays),
    "moe_aux_loss_coeff": Row(0.01, EXPERTS),
    "moe_z_loss_coeff": Row(0.01, EXPERTS),
    "moe_input_jitter_eps": Row(0.1, EXPERTS),
    "moe_expert_capacity_factor": Row(1.0, EXPERTS),
    "moe_pad_expert_input_to_capacity": Row(True, CAPACITY),
    "moe_token_drop_policy": Row("position", CAPACITY),
    "moe_shared_expert_intermediate_size": Row(16, EXPERTS),
    "moe_shared_expert_gate": Row(True, SHARED),
    "moe_apply_probs_on_input": Row(True, ONE_EACH),
    "moe_latent_size": Row(16, EXPERTS),
    "moe_per_layer_logging": Row(True, EXPERTS),
    "moe_layer_recompute": Row(True, EXPERTS),
    "moe_token_dispatcher_type": Row("alltoall", EXPERTS, mesh="expert=2"),
    "moe_expert_rank_capacity_factor": Row(1.0, SPLIT_EXPERTS, mesh="expert=2"),
    "activation_func_clamp_value": Row(7.0, SWIGLU),
    "glu_linear_offset": Row(1.0, SWIGLU),
    "softmax_scale": Row(0.1),
    "softmax_type": Row("off-by-one"),
    "logit_softcap": Row(5.0),
    "window_size": Row((2, 0)),
    "window_attn_skip_freq": Row(2, WINDOW),
    "qk_layernorm": Row(True),
    "qk_layernorm_across_heads": Row(True, {"qk_layernorm": True}),
    "apply_query_key_layer_scaling": Hint(True),
    "attention_softmax_in_fp32": Hint(False),
    "batch_invariant_mode": Hint(True),
    "qk_clip": Row(True, look=attention_results),
    "qk_clip_alpha": Row(0.25, CLIP, clipped),
    "qk_clip_threshold": Row(50.0, CLIP, clipped),
    "log_max_attention_logit": Row(True, look=attention_results),
    "cp_comm_type": Row("all_gather", {"context_parallel_size": 2}, mesh="context=2"),
    "hierarchical_context_parallel_sizes": Row((4, 1), TWO_LEVELS, mesh="context=4"),
    "cp_load_balanced": Row(True, {"context_parallel_size": 2}, mesh="context=2"),
    "fp8": Row("hybrid"),
    "fp8_recipe": Row("delayed", FP8),
    "fp8_param": Row(True, FP8),
    "fp8_quantizer_factory": Row(OTHER_FACTORY, OWN_FP8, recipe),
    "fp8_margin": Row(1, DELAYED),
    "fp8_amax_history_len": Row(4, DELAYED),
    "fp8_amax_compute_algo": Row("max", HISTORY),
    "fp8_wgrad": Row(False, FP8),
    "fp8_output_proj": Row(True, FP8),
    "fp8_dot_product_attention": Row(True, FP8),
    "fp8_multi_head_attention": Row(True, FP8),
    "tp_only_amax_red": Row(True, DELAYED, mesh="data=2,tensor=2"),
    "fp4": Row("e2m1"),
    "fp4_recipe": Row("custom", FP4, recipe, beside={"fp4_quantizer_factory": FACTORY}),
    "fp4_param": Row(True, FP4),
    "fp4_quantizer_factory": Row(OTHER_FACTORY, OWN_FP4, recipe),
    "first_last_layers_bf16": Row(True, FP8 | {"num_layers": 3}),
    "num_layers_at_start_in_bf16": Row(0, BF16),
    "num_layers_at_end_in_bf16": Row(0, BF16),
    "tensor_model_parallel_size": Row(2, look=accepts_mesh, mesh="tensor=4"),
    "sequence_parallel": Row(True, TENSOR, mesh="tensor=2"),
    "context_parallel_size": Row(2, look=accepts_mesh, mesh="context=4"),
    "expert_model_parallel_size": Row(2, EXPERTS, look=accepts_mesh, mesh="expert=4"),
    "expert_tensor_parallel_size": Row(1, EXPERTS | TENSOR, mesh="tensor=2,expert=2"),
    "perform_initialization": Row(False, look=linear_kernel),
    "use_cpu_initialization": Hint(True),
    "init_model_with_meta_device": Refused(True, "nnx.eval_shape"),
    "fp16": Row(True, look=cast),
    "bf16": Row(True, look=cast),
    "params_dtype": Row("bfloat16"),
    "deterministic_mode": Refused(True, "XLA_FLAGS"),
    "gradient_accumulation_fusion": Hint(True),
    "delay_wgrad_compute": Row(True, look=waits_for_gradients),
    "tp_comm_overlap": Refused(True, "batch_parts=2"),
    "tp_comm_overlap_disable_qkv": Hint(True),
    "tp_comm_overlap_disable_fc1": Hint(True),
    "symmetric_ar_type": Hint("one_shot"),
    "disable_parameter_transpose_cache": Row(True, FP8, begins_microbatches),
    "quant_recipe": Row(RULES, look=megatron_step),
    "num_layers": Row(3),
    "hidden_size": Row(64),
    "num_attention_heads": Row(2),
    "num_query_groups": Row(2),
    "ffn_hidden_size": Row(64),
    "kv_channels": Row(16),
    "latent_attention": Row(LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16)),
    "normalization": Row("RMSNorm"),
    "layernorm_epsilon": Row(1e-3),
    "layernorm_zero_centered_gamma": Row(True),
    "block_output_layernorm": Row(True),
    "block_input_layernorm": Row(False, {"block_output_layernorm": True}),
    "parallel_attention_mlp": Row(True),
    "fused_residual_rmsnorm": Row(True, {"normalization": "RMSNorm"}, norm_results),
    "bias_activation_fusion": Row(False),
    "use_te_activation_func": Row(False),
    "use_transformer_engine_op_fuser": Row(False),
    "activation": Row("relu"),
    "activation_func": Row("relu"),
    "gated_linear_unit": Row(True),
    "add_bias_linear": Row(False),
    "add_qkv_bias": Row(True, {"add_bias_linear": False}),
    "attention_dropout": Row(0.1),
    "hidden_dropout": Row(0.1),
    "init_method_std": Row(0.1, look=initial),
    "init_method": Row(jax.nn.initializers.ones, look=initial),
    "output_layer_init_method": Row(jax.nn.initializers.ones, look=initial),
    "compute_dtype": Row("bfloat16"),
    "mtp_num_layers": Row(1),
    "mtp_loss_scaling_factor": Row(0.5, DEPTHS),
    "mtp_use_repeated_layer": Row(True, DEPTHS),
}

ROPE: Fields = {"rope_type": "rope"}
LATENT: dict[str, Row | Hint | Refused] = {
    "multi_latent_attention": Refused(False, "take TransformerConfig"),
    "q_lora_rank": Row(None),
    "kv_lora_rank": Row(32),
    "qk_head_dim": Row(16),
    "qk_pos_emb_head_dim": Row(16),
    "v_head_dim": Row(16),
    "rope_type": Row("rope"),
    "rotary_base": Row(1000.0),
    "rotary_percent": Row(0.5, ROPE),
    "rotary_scaling_factor": Row(20.0),
    "original_max_position_embeddings": Row(16),
    "beta_fast": Row(16.0, {"original_max_position_embeddings": 256}),
    "beta_slow": Row(2.0, {"original_max_position_embeddings": 256}),
    "mscale": Row(0.5),
    "mscale_all_dim": Row(0.5),
    "cache_mla_latents": Hint(True),
    "mla_down_proj_fusion": Refused(True, "separate layers"),
}


@functools.cache
def seen_of(kind: Any, look: Look, mesh: str | None, given: tuple[tuple[str, Any], ...]) -> Any:
    with on_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of deprecated names
        return look(kind(**SIZES | dict(given)))


def seen(kind: Any, row: Row, **changes: Any) -> Any:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in (row.given | changes).items()}
    return seen_of(kind, row.look or step, row.mesh, tuple(given.items()))


CASES = [(TransformerConfig, name) for name in MULTI_HEAD] + [(MLATransformerConfig, name) for name in LATENT]


def test_every_field_has_a_row():
    own, latent = ({each.name for each in dataclasses.fields(kind) if each.compare} for kind in KINDS)
    assert own == set(MULTI_HEAD)
    assert latent - own == set(LATENT)


KINDS = (TransformerConfig, MLATransformerConfig)


@pytest.mark.slow  # half a second for each field
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_a_field_is_followed_or_logged_or_refused(kind, name, caplog):
    row = (MULTI_HEAD | LATENT)[name]
    if isinstance(row, Hint):
        log_once.cache_clear()
        with caplog.at_level(logging.INFO, logger="jax_te"):
            kind(**SIZES, **{name: row.value})
        assert [record.getMessage().split()[0] for record in caplog.records] == [name]
    elif isinstance(row, Refused):
        with pytest.raises(ValueError, match=row.message):
            kind(**SIZES | row.given | {name: row.value})
    else:
        default = {each.name: each.default for each in dataclasses.fields(kind)}[name]
        assert row.value != row.given.get(name, default)
        assert seen(kind, row, **row.beside, **{name: row.value}) != seen(kind, row)
