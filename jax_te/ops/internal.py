"""Names of `jax_te.ops` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.ops import te
from jax_te.ops.attention.masks import normal_window
from jax_te.ops.attention.segments import check_boundaries, segment_positions
from jax_te.ops.attention.spec import QKV, AttentionArrays
from jax_te.ops.linear.deferred import deferred_sink, deferred_wgrad
from jax_te.ops.linear.spec import Probe, Summands
from jax_te.ops.stacked import residuals_are_stacked
from jax_te.ops.te.load import available

__all__ = [
    "QKV",
    "AttentionArrays",
    "Probe",
    "Summands",
    "available",
    "check_boundaries",
    "deferred_sink",
    "deferred_wgrad",
    "normal_window",
    "residuals_are_stacked",
    "segment_positions",
    "te",
]
