"""Megatron-Core's configuration fields that this package lacks: hints to CUDA, and unsupported options."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from jax_te._validation import kinds_of, log_hints, log_once
from jax_te.typing import DTypeLike

T = TypeVar("T", bound=type)


class Hints:
    """Fields that choose kernels, layouts in memory, or how devices communicate, which XLA and this package choose.

    Annotations and defaults are those of Megatron-Core of August 2026. Each field was looked up in its source: none
    changes what a layer computes, what its weights mean, or what is communicated.
    """

    # Kernels.
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    memory_efficient_layer_norm: bool = False
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False
    fused_single_qkv_rope: bool = False
    use_fused_weighted_squared_relu: bool = False
    disable_bf16_reduced_precision_matmul: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    flash_attention_version: Literal[2, 3, 4] | None = None
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = "transformer_engine"
    batch_invariant_backend: str = "te_native"
    flash_decode: bool = False
    use_te_rng_tracker: bool = False
    # Tensor-parallel communication, which tp_comm_overlap, a field that is refused, would overlap.
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = "nccl"
    nccl_all_reduce_for_prefill: bool = False
    high_priority_a2a_comm_stream: bool = False
    clone_scatter_output_in_embedding: bool = True
    cp_partition_mode: Literal["zigzag", "contiguous"] = "zigzag"
    # Pipeline stages.
    pipeline_dtype: DTypeLike | None = None
    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    # Timers, logs, tests.
    barrier_with_L1_time: bool = True
    timers: Callable[..., Any] | None = None
    config_logger_dir: str = ""
    test_mode: bool = False
    fp8_interval: int = 1
    # Experts.
    moe_grouped_gemm: bool = False
    moe_use_grouped_tensor: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_shared_expert_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = "deepep"
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None
    moe_hybridep_num_sms: int | None = None
    moe_hybridep_num_blocks_permute: int | None = None
    moe_hybridep_num_blocks_unpermute: int | None = None
    moe_hybridep_num_sms_preprocessing: int = 108
    moe_permute_fusion_into_hybridep: bool = False
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False
    moe_ncclep_static_shape: bool = False
    moe_ncclep_zero_copy: bool = False
    moe_single_grouped_weight: bool = False
    moe_single_grouped_bias: bool = False
    moe_paged_stash: bool = False
    moe_paged_stash_page_size: int = 64
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    moe_pad_experts_for_cuda_graph_inference: bool = False
    # Inference.
    inference_rng_tracker: bool = False
    inference_fuse_tp_communication: bool = False
    inference_disable_triton_nvls_kernels: bool = False
    inference_grouped_gemm_backend: Literal["flashinfer", "torch", "vllm"] = "vllm"
    inference_cuda_graph_scope: Literal["none", "layer", "block"] | None = None
    inference_moe_disable_fused_quant_kernels: bool = False
    inference_moe_token_dispatcher_type: Literal["nccl", "nvls"] = "nvls"


HINTS: dict[str, Any] = {name: getattr(Hints, name) for name in Hints.__annotations__}
"""Fields that are hints -> Megatron-Core's default."""

_OTHER_NUMBERS = {
    "moe_router_padding_for_quantization=False moe_router_padding_for_fp8=False": "an expert's rows are padded with "
    "zeros, always. Megatron pads them with tokens that did not choose the expert, and its expert bias counts these: "
    "numbers differ from Megatron's",
    "inference_sampling_seed=42": "jax_te.models.generate draws tokens from the key of its call",
}
"""Fields without effect here that change numbers in Megatron -> what they change."""

_INTERLEAVED = (
    "it has the rows of linear_fc1.weight alternate between gate and factor in blocks of this size, and here all rows "
    "of the gate come first. Reorder the weights: w.reshape(-1, 2, size, columns).swapaxes(0, 1).reshape(w.shape)"
)
_REFUSED = {
    "moe_mlp_glu_interleave_size=None moe_shared_expert_glu_interleave_size=None": _INTERLEAVED,
    "use_grouped_gemm_for_dense_mlp=False use_grouped_gemm_for_shared_expert=False": "its kernel has the rows of "
    "linear_fc1.weight alternate between gate and factor in blocks, and here all rows of the gate come first; the MLP "
    "without it computes the same from weights in that order",
    "mlp_chunks_for_prefill=1 mlp_chunks_for_training=1": "each part of the tokens would have scales, losses of "
    "routers and room at experts of its own; jax_te.remat saves this memory",
    "pipeline_model_parallel_size=1 virtual_pipeline_model_parallel_size=None num_layers_in_first_pipeline_stage=None "
    "num_layers_in_last_pipeline_stage=None pipeline_model_parallel_layout=None "
    "account_for_embedding_in_pipeline_split=False account_for_loss_in_pipeline_split=False": "the mesh axis "
    "'pipeline' and jax_te.config.PipelineConfig, an argument of make_train_step, split a model into stages",
    "defer_embedding_wgrad_compute=False wgrad_deferral_limit=0": "jax_te.training.deferred_vjp defers the gradients "
    "of kernels, not that of the embedding",
    "num_microbatches_with_partial_activation_checkpoints=None": "recompute_granularity is for all microbatches",
    "moe_token_dropping=False": "moe_expert_capacity_factor drops tokens",
    "moe_dispatch_fwd_dtype='bf16' moe_combine_bwd_dtype='bf16'": "tokens reach their experts in the compute dtype",
    "moe_grad_scale_func=None": "jax_te.training scales the losses of routers as it scales the model's; in a loop of "
    "your own jax_te.layers.set_aux_loss_scale(model, scale) says by how much the loss is scaled",
    "mtp_detach_heads=False": "gradients of further tokens' losses reach the whole model",
    "mtp_hsm=False mtp_hybrid_override_pattern=None": "the layers of multi-token prediction are transformer layers",
    "multi_latent_attention=False": "jax_te.config.MLATransformerConfig has it, with Megatron-Core's fields",
    "experimental_attention_variant=None attention_output_gate=False head_wise_attn_gate=False qk_l2_norm=False": "the "
    "models' attention does not have this; build one from the layers of jax_te.layers, whose DotProductAttention takes "
    "queries, keys and values",
    "is_hybrid_model=False enable_mhc_connections=False heterogeneous_block_specs=False": "the models are stacks of "
    "equal transformer layers; build another stack from the layers of jax_te.layers",
    "hetereogenous_dist_checkpoint=False": "checkpoints hold each layer's arrays by name, whatever the layers are, and "
    "need no flag",
    "use_mup=False": "init_method is a model's initializer, and optax.multi_transform gives groups of parameters "
    "learning rates of their own",
    "no_rope_freq=None rotary_base_per_layer=None mrope_section=None rotary_interleaved=False": "a model's "
    "position_embedding_type=jax_te.models.RotaryPositions(...) is for all its layers; in a model of your own "
    "jax_te.layers.rotary_embedding has positions, a base and pairs of its own for each layer",
    "use_inference_optimized_layers=False": "jax_te.models.generate runs the layers of training",
    "gtp_weight_remat_size=1 expert_gtp_weight_remat_size=1 tensor_parallel_num_weight_shards=None "
    "expert_tensor_parallel_num_weight_shards=None": "the mesh axis 'fsdp' shards weights",
    "hybrid_context_parallel=False max_seqlen_per_dp_cp_rank=None": "cp_load_balanced=True balances sequences, and "
    "jax_te.layers.PackedSeqParams packs them",
    "finalize_model_grads_func=None grad_scale_func=None mtp_grad_scale_func=None "
    "no_sync_func=None grad_sync_func=None param_sync_func=None": "jax_te.training.make_train_step scales losses, adds "
    "microbatches up and has reduce_gradients, when devices add up kernels' gradients",
    "calculate_per_token_loss=False": "a loss that returns jax_te.training.WeightedMean is the mean over all tokens",
    "enable_autocast=False autocast_dtype=None fp32_residual_connection=False": "compute_dtype is the dtype of "
    "activations and the residual stream, params_dtype that of parameters",
    "cpu_offloading=False fine_grained_activation_offloading=False": "jax_te.remat.remat(policy='offload_gemms') "
    "offloads activations to the host",
    "apply_residual_connection_post_layernorm=False": "jax_te.layers.TransformerLayer has an argument of this name",
    "activation_func_fp8_input_store=False": "jax_te.remat.selective_recompute('activation') saves this memory",
    "embedding_init_method=None embedding_init_method_std=None": "init_method draws embeddings, too",
    "use_kitchen=False use_kitchen_attention=False": "quant_recipe takes quantization files of Transformer Engine",
}
"""Fields that would change numbers or communication -> what JAX has in their place."""

_REFINEMENTS = {
    "cpu_offloading": "cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations "
    "cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers",
    "fine_grained_activation_offloading": "offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph "
    "delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads",
    "pipeline_model_parallel_layout": "mtp_standalone",
    "experimental_attention_variant": "experimental_attention_variant_loss_scale_func dsa_indexer_n_heads "
    "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff "
    "dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation "
    "dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq "
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads",
    "use_mup": "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
    "mup_attn_scale_power",
    "use_kitchen_attention": "kitchen_attention_backend",
    "gtp_weight_remat_size": "gtp_remat_opt_in_modules",
    "enable_mhc_connections": "mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor "
    "mhc_recompute_layer_num",
    "is_hybrid_model": "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads gdp_num_householder "
    "mamba_training_ssm_states_dtype use_mamba_mem_eff_path gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute",
}
"""Field of `_REFUSED` -> fields that refine it."""

# Dropped in silence, whatever their values: what they refine is off, or the configuration is refused, and while it is
# off Megatron-Core does not read them either. So they have no meaning that a program could miss.
_IDLE = frozenset(" ".join(_REFINEMENTS.values()).split())

_LATENT = frozenset(
    """
q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim cache_mla_latents
mla_down_proj_fusion
""".split()  # noqa: SIM905 - a list of a hundred strings is hard to read
)
"""Fields of ``MLATransformerConfig`` alone."""


def accepts_megatron_fields(config: T) -> T:
    """Return a configuration class whose constructor accepts all of Megatron-Core's fields.

    A field that the class lacks is dropped if it has Megatron's default or only tunes CUDA, which is logged once, and
    refused if it would change numbers, communication or the meaning of weights.

    Raises:
        ValueError: when called, for a field that is refused; the message names what JAX has in its place; for a value
            that Megatron's field does not take.
        TypeError: when called, for a field that neither has; the message names those that are most alike; for a value
            of another type than Megatron's field has.

    >>> from dataclasses import dataclass
    >>> @accepts_megatron_fields
    ... @dataclass(frozen=True)
    ... class Config:
    ...     num_layers: int = 1
    >>> Config(num_layers=2, bias_dropout_fusion=True, cpu_offloading=False)
    Config(num_layers=2)
    """
    init, fields_of = config.__init__, dataclasses.fields(config)
    own = {field.name for field in fields_of if field.init}
    computed = {field.name for field in fields_of if not field.init}

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **fields: Any) -> None:
        unknown = []
        for name in [name for name in fields if name not in own]:
            if _is_dropped(name, fields[name]):
                del fields[name]
            else:
                unknown.append(name)
        if unknown:
            raise TypeError(_about_unknown(config.__name__, unknown, own, computed))
        init(self, *args, **fields)

    config.__init__ = construct
    return config


def _is_dropped(name: str, value: Any) -> bool:
    """Return whether a field without effect was given. Raise ValueError for one that would have an effect."""
    # Megatron's enums: their names are what its command line takes.
    value = getattr(value, "name", value)
    if name in HINTS:
        kinds_of(Hints)[name].check(name, value)
        log_hints(**{name: value != HINTS[name]})
        return True
    for names, difference in _OTHER_NUMBERS.items():
        if name in parsed(names):
            if value != parsed(names)[name]:
                log_once(f"{name}={value!r} has no effect: {difference}")
            return True
    for names, instead in _REFUSED.items():
        if name in parsed(names):
            if value != parsed(names)[name]:
                raise ValueError(f"{name}={value!r} is not supported: {instead}. Leave it out")
            return True
    return name in _IDLE


def _about_unknown(config: str, unknown: list[str], own: set[str], computed: set[str]) -> str:
    """Return the message about fields that neither this package's configuration nor Megatron-Core's has."""
    latent = [name for name in unknown if name in _LATENT]
    if latent:
        return (
            f"{config} has no {', '.join(latent)}: jax_te.config.MLATransformerConfig has, as in Megatron-Core. "
            "Without latent attention leave them out: rotary positions are an argument of the model, "
            "jax_te.models.RotaryPositions(base=, percent=, scaling=)"
        )
    filled = [name for name in unknown if name in computed]
    if filled:
        return f"{config} computes {', '.join(filled)} from its other fields; leave it out"
    known = own.union(_IDLE, HINTS, *map(parsed, _OTHER_NUMBERS), *map(parsed, _REFUSED))
    parts = []
    for name in unknown:
        alike = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
        parts.append(f"no field {name!r}" + (f" (most alike: {', '.join(alike)})" if alike else ""))
    return (
        f"{config} has {'; '.join(parts)}. Correct the name, or leave it out; the class's docstring lists its "
        "fields, and docs/parity.md Megatron-Core's"
    )


@functools.cache
def parsed(fields: str) -> dict[str, Any]:
    """Return field -> default.

    >>> parsed("cpu_offloading=False mtp_hsm=None")
    {'cpu_offloading': False, 'mtp_hsm': None}
    """
    pairs = (field.partition("=") for field in fields.split())
    return {name: ast.literal_eval(default) for name, _, default in pairs}
