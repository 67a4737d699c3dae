"""Names of `jax_te.metrics` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.metrics.log import PLOT_FILE
from jax_te.metrics.precision_log import PRECISION_FILE, PRECISION_PLOT, chart_values, plain_values
from jax_te.metrics.progress import clock, counting
from jax_te.metrics.writers import METRICS_FILE, TENSORBOARD_FOLDER, require_writers

__all__ = [
    "METRICS_FILE",
    "PLOT_FILE",
    "PRECISION_FILE",
    "PRECISION_PLOT",
    "TENSORBOARD_FOLDER",
    "chart_values",
    "clock",
    "counting",
    "plain_values",
    "require_writers",
]
