"""Fields of Megatron-Core's configurations that this package's do not have: hints to CUDA, and those it refuses."""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import Any, TypeVar

from jax_te.config.checks import log_hints

T = TypeVar("T", bound=type)

# Field=default, as in Megatron-Core of August 2026.
HINTS = """
bias_activation_fusion=False masked_softmax_fusion=False persist_layer_norm=False memory_efficient_layer_norm=False
bias_dropout_fusion=False apply_rope_fusion=False fused_single_qkv_rope=False use_fused_weighted_squared_relu=False
use_transformer_engine_op_fuser=False use_te_activation_func=False disable_bf16_reduced_precision_matmul=False
cross_entropy_loss_fusion=False cross_entropy_fusion_impl='native' attention_backend='auto'
flash_attention_version=None transformer_impl='transformer_engine' batch_invariant_backend='te_native'
tp_comm_bulk_wgrad=True tp_comm_bulk_dgrad=True tp_comm_overlap_ag=True tp_comm_overlap_rs=True
tp_comm_overlap_rs_dgrad=False tp_comm_split_ag=True tp_comm_atomic_ag=False tp_comm_split_rs=True
tp_comm_atomic_rs=False tp_comm_bootstrap_backend='nccl' nccl_all_reduce_for_prefill=False
high_priority_a2a_comm_stream=False clone_scatter_output_in_embedding=True barrier_with_L1_time=True timers=None
config_logger_dir='' test_mode=False cp_partition_mode='zigzag' fp8_interval=1 pipeline_dtype=None
pipeline_model_parallel_comm_backend=None variable_seq_lengths=False overlap_p2p_comm=False use_te_rng_tracker=False
batch_p2p_comm=True batch_p2p_sync=True use_ring_exchange_p2p=False deallocate_pipeline_outputs=False
overlap_p2p_comm_warmup_flush=False microbatch_group_size_per_vp_stage=None flash_decode=False
mlp_chunks_for_prefill=1 mlp_chunks_for_training=1
"""
"""Fields that choose kernels, or how pipeline stages communicate, which XLA chooses."""

_REFUSED = {
    "pipeline_model_parallel_size=1 virtual_pipeline_model_parallel_size=None num_layers_in_first_pipeline_stage=None "
    "num_layers_in_last_pipeline_stage=None pipeline_model_parallel_layout=None "
    "account_for_embedding_in_pipeline_split=False account_for_loss_in_pipeline_split=False "
    "defer_embedding_wgrad_compute=False wgrad_deferral_limit=0 "
    "num_microbatches_with_partial_activation_checkpoints=None": "the mesh axis "
    "'pipeline' and jax_te.pipeline.PipelineConfig, an argument of make_train_step, split a model into stages",
    "num_moe_experts=None overlap_moe_expert_parallel_comm=False overlap_dispatch_backward_with_experts_wgrad=False "
    "ep_overlap_early_attn_memory_release=False use_grouped_gemm_for_shared_expert=False "
    "use_grouped_gemm_for_dense_mlp=False": "there is no dispatch of tokens to experts; the layers of an expert are",
    "mtp_num_layers=None experimental_attention_variant=None is_hybrid_model=False enable_mhc_connections=False "
    "use_mup=False multi_latent_attention=False attention_output_gate=False head_wise_attn_gate=False "
    "heterogeneous_block_specs=False hetereogenous_dist_checkpoint=False qk_l2_norm=False no_rope_freq=None "
    "rotary_base_per_layer=None mrope_section=None use_inference_optimized_layers=False rotary_interleaved=False": ""
    "the models do not have this; build one from the layers of jax_te.layers, and see rotary_embedding",
    "gtp_weight_remat_size=1 expert_gtp_weight_remat_size=1 tensor_parallel_num_weight_shards=None "
    "expert_tensor_parallel_num_weight_shards=None": "the mesh axis 'fsdp' shards weights",
    "hybrid_context_parallel=False max_seqlen_per_dp_cp_rank=None": "cp_load_balanced=True balances sequences, and "
    "jax_te.layers.PackedSeqParams packs them",
    "finalize_model_grads_func=None grad_scale_func=None moe_grad_scale_func=None mtp_grad_scale_func=None "
    "no_sync_func=None grad_sync_func=None param_sync_func=None": "jax_te.training.make_train_step scales losses, adds "
    "microbatches up and has reduce_gradients, when devices add up kernels' gradients",
    "calculate_per_token_loss=False": "a loss that returns jax_te.training.WeightedMean is the mean over all tokens",
    "enable_autocast=False autocast_dtype=None fp32_residual_connection=False": "compute_dtype is the dtype of "
    "activations and the residual stream, params_dtype that of parameters",
    "cpu_offloading=False fine_grained_activation_offloading=False": "jax_te.remat.remat(policy='offload_gemms') "
    "offloads activations to the host",
    "apply_residual_connection_post_layernorm=False": "jax_te.layers.TransformerLayer has an argument of this name",
    "glu_linear_offset=0.0 activation_func_clamp_value=None": "activation='clamped_swiglu' and "
    "jax_te.config.ActivationParams have an offset and a limit",
    "activation_func_fp8_input_store=False": "jax_te.remat.selective_recompute('activation') saves this memory",
    "embedding_init_method=None embedding_init_method_std=None": "init_method draws embeddings, too",
    "use_kitchen=False use_kitchen_attention=False": "quant_recipe takes quantization files of Transformer Engine",
}
"""Fields that would change numbers or communication -> what JAX has in their place."""

_IDLE = (
    *(
        "moe_",
        "mtp_",
        "dsa_",
        "linear_",
        "experimental_attention_",
        "mamba_",
        "gdp_",
        "mhc_",
        "mup_",
        "inference_",
    ),
    *("cpu_offloading_", "_cpu_offloading_", "kitchen_", "gtp_", "use_mamba_", "offload_", "min_offloaded_"),
    *("delay_offload_", "delta_offload_", "activation_offload_", "fine_grained_offloading_"),
)
"""Beginnings of fields that say nothing while a field of `_REFUSED` is off, which they would describe."""


def accepts_megatron_fields(config: T) -> T:
    """Return a configuration class whose constructor knows all fields of Megatron-Core's.

    A field that the class lacks is dropped if it has Megatron's default or only tunes CUDA, which is logged once, and
    refused if it would change numbers or communication.

    Raises:
        ValueError: when called, for a field that is refused; the message names what JAX has in its place.

    >>> from dataclasses import dataclass
    >>> @accepts_megatron_fields
    ... @dataclass(frozen=True)
    ... class Config:
    ...     num_layers: int = 1
    >>> Config(num_layers=2, bias_dropout_fusion=True, num_moe_experts=None)
    Config(num_layers=2)
    """
    init, own = config.__init__, {field.name for field in dataclasses.fields(config)}

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **fields: Any) -> None:
        for name in [name for name in fields if name not in own]:
            if _is_dropped(name, fields[name]):
                del fields[name]
        init(self, *args, **fields)

    config.__init__ = construct
    return config


def _is_dropped(name: str, value: Any) -> bool:
    """Return whether a field without effect was given. Raise ValueError for one that would have an effect."""
    # Megatron's enums: their names are what its command line takes.
    value = getattr(value, "name", value)
    if name in parsed(HINTS):
        log_hints(**{name: value != parsed(HINTS)[name]})
        return True
    for names, instead in _REFUSED.items():
        if name in parsed(names):
            if value != parsed(names)[name]:
                raise ValueError(f"{name}={value!r} is not supported: {instead}. Leave it out")
            return True
    return name.startswith(_IDLE)


@functools.cache
def parsed(fields: str) -> dict[str, Any]:
    """Return field -> default.

    >>> parsed("timers=None fp8_interval=1")
    {'timers': None, 'fp8_interval': 1}
    """
    pairs = (field.partition("=") for field in fields.split())
    return {name: ast.literal_eval(default) for name, _, default in pairs}
