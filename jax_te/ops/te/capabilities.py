"""Quantizations that Transformer Engine has; known without importing it."""

from __future__ import annotations

from jax_te.quantize import MXQuantizer, NVFP4Quantizer, Quantizer, TensorQuantizer


def is_te_quantizer(quantizer: Quantizer | None) -> bool:
    """Return whether TE's kernels support this quantization; otherwise jax_te's do it (`jax_te.ops.xla`).

    >>> is_te_quantizer(None)
    True
    """
    if isinstance(quantizer, TensorQuantizer):
        # TE's current scales are quotients; it does not round those of whole tensors to powers of two.
        return not quantizer.power_of_two
    return quantizer is None or isinstance(quantizer, MXQuantizer | NVFP4Quantizer)
