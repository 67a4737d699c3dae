"""Names of `jax_te.config` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.config.activation import activation_parts
from jax_te.config.annotations import check_annotations, checked, is_integer, literal_names
from jax_te.config.checks import (
    COMPUTE_DTYPES,
    FLOAT_DTYPES,
    check_axes,
    check_bool,
    check_choice,
    check_float,
    check_leaves,
    check_number,
    check_positive,
    check_rate,
    check_seed,
    dtype_name,
    float_dtype,
    log_hints,
    log_once,
)
from jax_te.config.extras import require_extra
from jax_te.config.files import brief, read_text
from jax_te.config.initializers import normal_init, scaled_normal_init
from jax_te.config.mesh import check_mesh_axis
from jax_te.config.model_parallel import SYMMETRIC_AR_TYPES
from jax_te.config.recompute import RECOMPUTE_POLICIES
from jax_te.config.transformer import POSITION_EMBEDDINGS

__all__ = [
    "COMPUTE_DTYPES",
    "FLOAT_DTYPES",
    "POSITION_EMBEDDINGS",
    "RECOMPUTE_POLICIES",
    "SYMMETRIC_AR_TYPES",
    "activation_parts",
    "brief",
    "check_annotations",
    "check_axes",
    "check_bool",
    "check_choice",
    "check_float",
    "check_leaves",
    "check_mesh_axis",
    "check_number",
    "check_positive",
    "check_rate",
    "check_seed",
    "checked",
    "dtype_name",
    "float_dtype",
    "is_integer",
    "literal_names",
    "log_hints",
    "log_once",
    "normal_init",
    "read_text",
    "require_extra",
    "scaled_normal_init",
]
