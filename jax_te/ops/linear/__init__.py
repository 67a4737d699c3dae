"""Linear layers, norms and activation functions as differentiable functions on arrays."""

from jax_te.ops.linear.deferred import deferred_sink, deferred_wgrad
from jax_te.ops.linear.spec import LinearSpec, Probe, Summands
