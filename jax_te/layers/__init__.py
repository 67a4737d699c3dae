"""NNX layers in Transformer Engine's vocabulary."""

from jax_te.config import normal_init, scaled_normal_init
from jax_te.layers.attention.core import AttentionCore
from jax_te.layers.attention.dot_product_attention import DotProductAttention, alibi_slopes
from jax_te.layers.attention.kv_cache import KVCache, WindowKVCache, init_kv_cache, init_window_kv_cache
from jax_te.layers.attention.multi_latent_attention import MultiLatentAttention
from jax_te.layers.attention.multihead_attention import MultiheadAttention
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.attention.qk_clip import check_clip_qk, clip_qk
from jax_te.layers.attention.relative_bias import RelativePositionBias
from jax_te.layers.attention.rotary import Rotary, apply_rotary, rotary_embedding
from jax_te.layers.attention.rotary_scaling import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from jax_te.layers.dropout import drop_path, dropout
from jax_te.layers.embedding import Embedding
from jax_te.layers.flax.decisions import DropInLayer, DropInReport
from jax_te.layers.flax.drop_in import DotGeneral, EinsumOp
from jax_te.layers.flax.quantize_model import dequantize_model, quantize_model
from jax_te.layers.fp8_padding import Fp8Padding, Fp8Unpadding
from jax_te.layers.kernel_cache import (
    KernelCache,
    cached_kernels,
    drop_cached_kernels,
    quantize_kernels,
    set_grad_sinks,
    use_cached_kernels,
    with_grad_sinks,
)
from jax_te.layers.keywords import (
    AttentionCallKeywords,
    AttentionOptions,
    DotProductAttentionCallKeywords,
    DotProductAttentionKeywords,
    LayerNormLinearKeywords,
    LayerNormMLPKeywords,
    LinearKeywords,
    MultiheadAttentionKeywords,
    TransformerLayerCallKeywords,
    TransformerLayerKeywords,
)
from jax_te.layers.layernorm_linear import LayerNormLinear
from jax_te.layers.layernorm_mlp import LayerNormMLP, check_elementwise
from jax_te.layers.linear import Linear, split_axis
from jax_te.layers.lora import LoRA, lora_labels, without_adapter
from jax_te.layers.mode import TrainingMode
from jax_te.layers.model_kernels import (
    GivesKernels,
    keep_in_high_precision,
    name_modules,
    natural_order,
    precision_while_building,
    quantizable_kernels,
    quantizable_modules,
    quantize_parameters,
)
from jax_te.layers.moe.aux_loss_scale import aux_losses_scaled, has_aux_loss_scale, set_aux_loss_scale
from jax_te.layers.moe.expert_metrics import expert_metrics, step_metrics
from jax_te.layers.moe.expert_rows import ExpertRows, expert_rows
from jax_te.layers.moe.experts import Experts, SharedExperts, gate_parameter, shared_experts
from jax_te.layers.moe.grouped_linear import GroupedLinear
from jax_te.layers.moe.grouped_lora import GroupedLoRA
from jax_te.layers.moe.mixture import MixtureOfExperts, MoE
from jax_te.layers.moe.router import Router, Routing, check_padding_mask
from jax_te.layers.moe.router_state import LastStep
from jax_te.layers.norm import LayerNorm, RMSNorm, make_norm, norm_spec
from jax_te.layers.parallel_arguments import (
    TensorParallel,
    check_context_size,
    check_expert_size,
    check_tp_group,
    sequence_axes,
)
from jax_te.layers.parameters import StepState, expert_rngs, parameter, parameter_axes
from jax_te.layers.prepare import prepare_quantization
from jax_te.layers.quantizable import CachedKernel, QuantizableModule, RecipeModule, states_advance
from jax_te.layers.results import add_bias, layer_output, output_of, split_output
from jax_te.layers.transformer import TransformerLayer

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "AttentionCore",
    "DotGeneral",
    "DotProductAttention",
    "DropInLayer",
    "DropInReport",
    "EinsumOp",
    "Embedding",
    "ExpertRows",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "GroupedLoRA",
    "KVCache",
    "KernelCache",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "MoE",
    "MultiLatentAttention",
    "MultiheadAttention",
    "PackedSeqParams",
    "QuantizableModule",
    "RMSNorm",
    "RelativePositionBias",
    "Rotary",
    "RotaryScaling",
    "Router",
    "Routing",
    "SharedExperts",
    "TransformerLayer",
    "WindowKVCache",
    "YarnScaling",
    "alibi_slopes",
    "apply_rotary",
    "cached_kernels",
    "clip_qk",
    "dequantize_model",
    "drop_path",
    "dropout",
    "expert_metrics",
    "expert_rows",
    "init_kv_cache",
    "init_window_kv_cache",
    "keep_in_high_precision",
    "lora_labels",
    "make_norm",
    "name_modules",
    "normal_init",
    "parameter_axes",
    "prepare_quantization",
    "quantizable_modules",
    "quantize_kernels",
    "quantize_model",
    "quantize_parameters",
    "rotary_embedding",
    "scaled_normal_init",
    "set_aux_loss_scale",
]
