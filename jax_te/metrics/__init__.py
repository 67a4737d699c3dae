"""Records of a training run and their display: metrics writers, plots, progress, speed, and traces of kernels."""

from jax_te.metrics.experts_plot import plot_experts
from jax_te.metrics.files import (
    EXPERTS_PLOT,
    METRICS_FILE,
    PARTIAL,
    PLOT_FILE,
    PLOTS,
    PRECISION_FILE,
    PRECISION_PLOT,
    RECORD_FILES,
    TENSORBOARD_FOLDER,
    metrics_files,
)
from jax_te.metrics.log import MetricsLog, last_recorded_step, plot_losses
from jax_te.metrics.precision_log import PrecisionLog, chart_values, plain_values, plot_precision
from jax_te.metrics.progress import Progress, clock, counting, make_progress
from jax_te.metrics.throughput import Speed, StepWork, peak_flops, train_flops
from jax_te.metrics.trace import KernelTime, KernelTimes, StepTrace, kernel_kind, kernel_times
from jax_te.metrics.writers import MetricsWriter, has_content, require_writers

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "KernelTime",
    "KernelTimes",
    "MetricsLog",
    "MetricsWriter",
    "PrecisionLog",
    "Progress",
    "Speed",
    "StepTrace",
    "StepWork",
    "kernel_kind",
    "kernel_times",
    "make_progress",
    "peak_flops",
    "plot_experts",
    "plot_losses",
    "plot_precision",
    "train_flops",
]
