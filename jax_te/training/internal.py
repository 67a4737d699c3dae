"""Names of `jax_te.training` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.training.inspection import (
    TensorStatistics,
    calibrate_delayed_scaling,
    exact_model,
    inspect_precision,
    make_inspection,
)
from jax_te.training.sensitivity import ModuleSensitivity, keep_in_bf16_rules, sensitivity

__all__ = [
    "ModuleSensitivity",
    "TensorStatistics",
    "calibrate_delayed_scaling",
    "exact_model",
    "inspect_precision",
    "keep_in_bf16_rules",
    "make_inspection",
    "sensitivity",
]
