"""Megatron-Core's interfaces over the layers: linear layers and norms, quantization files, module base classes."""

from jax_te.megatron.attention import TEDotProductAttention, is_layer_window_attention
from jax_te.megatron.cross_entropy import vocab_parallel_cross_entropy
from jax_te.megatron.enums import (
    TE_CONFIG_TYPE_KEY,
    AttnMaskType,
    AttnType,
    Fp4Recipe,
    Fp8Recipe,
    TransformerEngineConfigType,
)
from jax_te.megatron.float16 import (
    ActivationDtype,
    Float16Module,
    conversion_helper,
    convert_module_to_dtype_except_fp32_marked,
    float16_to_fp32,
    fp32_to_float16,
    mark_keep_in_fp32,
)
from jax_te.megatron.graphable import GraphableMegatronModule
from jax_te.megatron.grouped_linear import (
    TEColumnParallelGroupedLinear,
    TEGroupedLinear,
    TERowParallelGroupedLinear,
)
from jax_te.megatron.layernorm_linear import TELayerNormColumnParallelLinear
from jax_te.megatron.layout import Layout, projection_groups
from jax_te.megatron.linear import TEColumnParallelLinear, TELinear, TERowParallelLinear
from jax_te.megatron.mla_self_attention import MLASelfAttention, mla_rotary
from jax_te.megatron.mlp import MLP
from jax_te.megatron.module import SYMMETRIC_AR_TYPES, MegatronModule, param_is_not_shared
from jax_te.megatron.moe import MoELayer, SharedExpertMLP, TopKRouter
from jax_te.megatron.norm import TENorm
from jax_te.megatron.quantization.apply import ModuleQuantization, QuantizationReport, apply_quantization_config
from jax_te.megatron.quantization.autocast import (
    get_fp8_autocast_for_quant_params,
    get_fp8_autocast_for_quant_recipe,
    get_should_context_be_quantized_params,
    get_should_context_be_quantized_recipe,
)
from jax_te.megatron.quantization.layer_precision import finish_init, set_save_original_input, will_execute_quantized
from jax_te.megatron.quantization.recipe_from_config import TEDelayedScaling, recipe_from_config
from jax_te.megatron.quantization.rules import (
    GlobMatcher,
    MatchContext,
    Matcher,
    QuantizationConfig,
    RecipeConfig,
    get_quant_config_or_none,
    load_quantization_recipe,
    match_context,
)
from jax_te.megatron.quantization.te_params import TEQuantizationParams
from jax_te.megatron.quantization.te_recipe import TEQuantizationRecipe, resolve_factory
from jax_te.megatron.recompute import te_checkpoint
from jax_te.megatron.rng import (
    InferenceCudaRNGStatesTracker,
    TECudaRNGStatesTracker,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from jax_te.megatron.self_attention import SelfAttention
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.split_layer import split_te_layernorm_column_parallel_linear
from jax_te.megatron.state_dict import IncompatibleKeys, load_state_dict, load_variables, state_dict
from jax_te.megatron.te_kwargs import condition_init_method, get_extra_te_kwargs
from jax_te.megatron.transformer_layer import TransformerLayer, attention_options

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "MLP",
    "SYMMETRIC_AR_TYPES",
    "TE_CONFIG_TYPE_KEY",
    "AttnMaskType",
    "AttnType",
    "Float16Module",
    "Fp4Recipe",
    "Fp8Recipe",
    "GlobMatcher",
    "GraphableMegatronModule",
    "IncompatibleKeys",
    "InferenceCudaRNGStatesTracker",
    "MLASelfAttention",
    "MatchContext",
    "Matcher",
    "MegatronModule",
    "MoELayer",
    "ModuleQuantization",
    "QuantizationConfig",
    "QuantizationReport",
    "RecipeConfig",
    "SelfAttention",
    "SharedExpertMLP",
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TECudaRNGStatesTracker",
    "TEDelayedScaling",
    "TEDotProductAttention",
    "TEGroupedLinear",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TEQuantizationParams",
    "TEQuantizationRecipe",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
    "TopKRouter",
    "TransformerEngineConfigType",
    "TransformerLayer",
    "apply_quantization_config",
    "condition_init_method",
    "conversion_helper",
    "convert_module_to_dtype_except_fp32_marked",
    "finish_init",
    "float16_to_fp32",
    "fp32_to_float16",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "get_extra_te_kwargs",
    "get_fp8_autocast_for_quant_params",
    "get_fp8_autocast_for_quant_recipe",
    "get_quant_config_or_none",
    "get_should_context_be_quantized_params",
    "get_should_context_be_quantized_recipe",
    "initialize_rng_tracker",
    "is_layer_window_attention",
    "load_quantization_recipe",
    "load_state_dict",
    "mark_keep_in_fp32",
    "match_context",
    "model_parallel_cuda_manual_seed",
    "param_is_not_shared",
    "recipe_from_config",
    "resolve_factory",
    "set_save_original_input",
    "sharded_state_dict",
    "split_te_layernorm_column_parallel_linear",
    "state_dict",
    "te_checkpoint",
    "vocab_parallel_cross_entropy",
    "will_execute_quantized",
]

# Megatron spells these functions with an underscore. Code written for it finds them under that spelling here; they are
# the functions of the same names without it, which `__all__` has.
_get_extra_te_kwargs = get_extra_te_kwargs
_get_fp8_autocast_for_quant_params = get_fp8_autocast_for_quant_params
_get_fp8_autocast_for_quant_recipe = get_fp8_autocast_for_quant_recipe
_get_should_context_be_quantized_params = get_should_context_be_quantized_params
_get_should_context_be_quantized_recipe = get_should_context_be_quantized_recipe
