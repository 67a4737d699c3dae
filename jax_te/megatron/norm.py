"""Normalization by a configuration."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_te.config.internal import checked
from jax_te.layers import LayerNorm, RMSNorm
from jax_te.megatron.te_kwargs import get_extra_te_kwargs


class TENorm:
    """Constructor of the norm that ``config.normalization`` names: a `LayerNorm` or `RMSNorm`, never a TENorm.

    Args:
        config: its fields ``normalization``, ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and
            ``params_dtype`` are read.
        hidden_size: ``h``.
        eps: added to the variance or mean square. As in Megatron, ``config.layernorm_epsilon`` is not read: pass it.
        has_residual: a residual connection starts at the norm's input. Megatron fuses the two if a second option,
            ``fused_residual_rmsnorm``, is on; XLA fuses them by itself, so the result is always the norm's output.
        rngs: not needed, because the initial values are constants.

    Raises:
        Exception: for another normalization; exactly this class, as in Megatron.
        ValueError: for a size or ``eps`` that is not positive.

    Source: ``megatron.core.extensions.transformer_engine.TENorm``.

    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, normalization="RMSNorm")
    >>> type(TENorm(config, 32, config.layernorm_epsilon)).__name__
    'RMSNorm'
    """

    @checked
    def __new__(
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        has_residual: bool = False,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> LayerNorm | RMSNorm:
        del has_residual  # XLA fuses without being told
        # A new object of another class, so Python does not call __init__ on it.
        layers = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in layers:
            raise Exception(
                f"Only LayerNorm and RMSNorm are supported as config.normalization, got {config.normalization!r}"
            )
        return layers[config.normalization](
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            rngs=nnx.Rngs(0) if rngs is None else rngs,
            **get_extra_te_kwargs(config),
        )
