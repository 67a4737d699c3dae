"""Names of `jax_te.quantize` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.quantize.block import BLOCK, MX_BLOCK
from jax_te.quantize.nvfp4 import rounding_key
from jax_te.quantize.observe import current_observer
from jax_te.quantize.state import as_float32_inside
from jax_te.quantize.tensor import as_matrix

__all__ = [
    "BLOCK",
    "MX_BLOCK",
    "as_float32_inside",
    "as_matrix",
    "current_observer",
    "rounding_key",
]
