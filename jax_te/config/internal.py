"""Names of `jax_te.config` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.config.activation import activation_parts
from jax_te.config.initializers import normal_init, scaled_normal_init
from jax_te.config.mesh import check_mesh_axis
from jax_te.config.model_parallel import SYMMETRIC_AR_TYPES
from jax_te.config.recompute import RECOMPUTE_POLICIES
from jax_te.config.transformer import POSITION_EMBEDDINGS

__all__ = [
    "POSITION_EMBEDDINGS",
    "RECOMPUTE_POLICIES",
    "SYMMETRIC_AR_TYPES",
    "activation_parts",
    "check_mesh_axis",
    "normal_init",
    "scaled_normal_init",
]
