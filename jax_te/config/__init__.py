"""Configuration dataclasses: frozen, keyword-only, checked once when built. They import without jax."""

from jax_te.config.activation import ACTIVATIONS, ActivationLike, ActivationParams, LimitedFunction, activation_parts
from jax_te.config.attention import (
    CP_COMM_TYPES,
    AttentionConfig,
    CpCommType,
    LatentAttentionOptions,
    is_windowed_layer,
)
from jax_te.config.cuda_graph import CudaGraphConfig
from jax_te.config.experts import (
    LOAD_BALANCING_TYPES,
    UNREAD_BY_BALANCING,
    DispatchOptions,
    ExpertsConfig,
    MoEOptions,
    RouterOptions,
)
from jax_te.config.initializers import NormalInit, normal_init, scaled_normal_init
from jax_te.config.kernel_counts import KernelSize, depth_projection, kernel_sizes, layer_kernels, layer_numbers
from jax_te.config.mesh import MESH_AXES, ParallelConfig
from jax_te.config.mla_transformer import MLATransformerConfig
from jax_te.config.model_parallel import SYMMETRIC_AR_TYPES, ModelParallelConfig
from jax_te.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from jax_te.config.precision import PrecisionConfig
from jax_te.config.recompute import DENSE_RECOMPUTE_MODULES, RECOMPUTE_MODULES, RECOMPUTE_POLICIES, RecomputeConfig
from jax_te.config.transformer import POSITION_EMBEDDINGS, TransformerConfig

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "ACTIVATIONS",
    "CP_COMM_TYPES",
    "LOAD_BALANCING_TYPES",
    "MESH_AXES",
    "PIPELINE_SCHEDULES",
    "RECOMPUTE_MODULES",
    "ActivationLike",
    "ActivationParams",
    "AttentionConfig",
    "CudaGraphConfig",
    "DispatchOptions",
    "ExpertsConfig",
    "LatentAttentionOptions",
    "LimitedFunction",
    "MLATransformerConfig",
    "MoEOptions",
    "ModelParallelConfig",
    "NormalInit",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RouterOptions",
    "TransformerConfig",
]
