"""Detection of arithmetic on the arrays of a quantized kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.typing import Array

# An odd number too long for fp32 and too large to be doubled: a result computed in floating point does not equal it
# after a cast to int32, and sums of two overflow int32.
WORD = 0x5A3C1E97
# Below any threshold, so that a mask of small values reaches it.
SPECK = 2.0**-100

_REFUSAL = (
    "arithmetic on a kernel that is stored quantized: its arrays are codes and their scales, of which sums, products, "
    "averages and casts mean nothing. Compute with the masters (state.masters, optimizer.masters), or with what "
    "QuantizedKernel.dequantize() returns"
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Guard:
    """Two constants next to a kernel's codes and scales, which arithmetic on all arrays changes.

    Where a dtype changes (``0.5 * (a + b)``, a moving average), no tree can be built of the results. Where all dtypes
    stay (``a + b``, a cast back), only the values on the device show it: `intact` is False.

    Args:
        word: `WORD`, int32, of each layer in a stack.
        speck: `SPECK`, fp32, in the same shape.

    Raises:
        TypeError: for a ``word`` in another dtype of numbers.
    """

    word: Any
    speck: Any

    def __post_init__(self) -> None:
        # Only arrays of numbers. JAX also builds trees of shapes, shardings, float0 and placeholders, and users those
        # of sizes (NumPy scalars) and of comparisons (bool).
        if isinstance(self.word, jax.Array | np.ndarray) and jnp.issubdtype(self.word.dtype, np.number):
            self._check_dtype()

    @staticmethod
    def new() -> Guard:
        """Return one layer's."""
        return Guard(word=jnp.asarray(WORD, jnp.int32), speck=jnp.asarray(SPECK, jnp.float32))

    def intact(self, layers: int) -> Array:
        """Return whether it is unchanged: bool, for each layer.

        Args:
            layers: number of axes of the stack.

        Raises:
            TypeError: if its dtype or shape has changed.
        """
        self._check_dtype()
        if self.word.ndim != layers:  # broadcast with a mask in the kernel's shape
            raise TypeError(_REFUSAL)
        return jnp.equal(self.word, WORD) & jnp.equal(self.speck, SPECK)

    def check(self) -> None:
        """Wait for the values.

        Raises:
            TypeError: if the values have changed.
        """
        if not bool(jnp.all(self.intact(self.word.ndim))):
            raise TypeError(_REFUSAL)

    def _check_dtype(self) -> None:
        if self.word.dtype != jnp.int32:
            raise TypeError(_REFUSAL)
