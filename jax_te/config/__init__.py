"""Configuration dataclasses: frozen, keyword-only, checked once when built. They import without jax."""

from jax_te.config.activation import ACTIVATIONS, ActivationLike, ActivationParams
from jax_te.config.attention import CP_COMM_TYPES, AttentionConfig
from jax_te.config.cuda_graph import CudaGraphConfig
from jax_te.config.initializers import NormalInit
from jax_te.config.mesh import MESH_AXES, ParallelConfig
from jax_te.config.model_parallel import ModelParallelConfig
from jax_te.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from jax_te.config.precision import PrecisionConfig
from jax_te.config.recompute import RECOMPUTE_MODULES, RecomputeConfig
from jax_te.config.transformer import TransformerConfig

__all__ = [
    "ACTIVATIONS",
    "CP_COMM_TYPES",
    "MESH_AXES",
    "PIPELINE_SCHEDULES",
    "RECOMPUTE_MODULES",
    "ActivationLike",
    "ActivationParams",
    "AttentionConfig",
    "CudaGraphConfig",
    "ModelParallelConfig",
    "NormalInit",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TransformerConfig",
]
