"""Records of a training run and their display: metrics files, TensorBoard, plots, progress."""

from jax_te.metrics.log import MetricsLog, plot_losses
from jax_te.metrics.precision_log import PrecisionLog, plot_precision
from jax_te.metrics.progress import Progress, make_progress

__all__ = [
    "MetricsLog",
    "PrecisionLog",
    "Progress",
    "make_progress",
    "plot_losses",
    "plot_precision",
]
