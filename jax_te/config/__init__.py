"""Configuration dataclasses: frozen, keyword-only, checked once when built."""

from jax_te.config.activation import ACTIVATIONS, ActivationParams
from jax_te.config.attention import CP_COMM_TYPES, AttentionConfig
from jax_te.config.checks import check_bool, check_choice, check_positive, check_rate, float_dtype
from jax_te.config.initializers import NormalInit
from jax_te.config.mesh import MESH_AXES, RESERVED_AXES, ParallelConfig, check_mesh_axis
from jax_te.config.model_parallel import SYMMETRIC_AR_TYPES, ModelParallelConfig
from jax_te.config.precision import PrecisionConfig
from jax_te.config.recompute import RECOMPUTE_MODULES, RecomputeConfig
from jax_te.config.transformer import TransformerConfig

__all__ = [
    "ACTIVATIONS",
    "CP_COMM_TYPES",
    "MESH_AXES",
    "RECOMPUTE_MODULES",
    "RESERVED_AXES",
    "SYMMETRIC_AR_TYPES",
    "ActivationParams",
    "AttentionConfig",
    "ModelParallelConfig",
    "NormalInit",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TransformerConfig",
    "check_bool",
    "check_choice",
    "check_mesh_axis",
    "check_positive",
    "check_rate",
    "float_dtype",
]
