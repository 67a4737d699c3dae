"""Normalization by a configuration."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_te._validation import checked
from jax_te.layers import LayerNorm, RMSNorm
from jax_te.megatron.state_dict import StateDicts
from jax_te.megatron.te_kwargs import get_extra_te_kwargs, in_dtype_of
from jax_te.typing import Array, LogicalAxes


class _Norm(StateDicts):
    """Attributes of Megatron's norms that those of `jax_te.layers` lack."""

    returns_residual: bool = False

    def __call__(self, x: Array, *, out_axes: LogicalAxes | None = None) -> Any:
        # The norm follows this class in the resolution order, which a type checker cannot know here.
        y = super().__call__(in_dtype_of(x, self.scale), out_axes=out_axes)  # type: ignore[misc, attr-defined]  # pyright: ignore
        return (y, x) if self.returns_residual else y


class _LayerNorm(_Norm, LayerNorm):
    """`LayerNorm` as `TENorm` makes it."""


class _RMSNorm(_Norm, RMSNorm):
    """`RMSNorm` as `TENorm` makes it."""


class TENorm:
    """Constructor of the norm that ``config.normalization`` names: a `LayerNorm` or `RMSNorm`, never a TENorm.

    Args:
        config: configuration, of which the fields ``normalization``, ``layernorm_zero_centered_gamma``,
            ``sequence_parallel`` and ``params_dtype`` are read.
        hidden_size: ``h``.
        eps: constant added to the variance or mean square. As in Megatron, ``config.layernorm_epsilon`` is not read:
            pass it.
        has_residual: whether a residual connection starts at the norm's input. If ``config.fused_residual_rmsnorm`` is
            True, too, a call returns ``(output, input)``, as Megatron's fused kernel does, and the attribute
            ``returns_residual`` is True.
        rngs: random streams, unused because the initial values are constants.

    Raises:
        Exception: for another normalization; exactly this class, as in Megatron.
        ValueError: for a size or ``eps`` that is not positive; for a LayerNorm that would return its residual.

    A call in fp32 of a norm in half precision computes in its dtype, as Transformer Engine's norms do.

    Source: ``megatron.core.extensions.transformer_engine.TENorm``.

    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, normalization="RMSNorm")
    >>> isinstance(TENorm(config, 32, config.layernorm_epsilon), RMSNorm)
    True
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
        # A new object of another class, so Python does not call __init__ on it.
        layers: dict[str, Any] = {"LayerNorm": _LayerNorm, "RMSNorm": _RMSNorm}
        if config.normalization not in layers:
            raise Exception(
                f"Only LayerNorm and RMSNorm are supported as config.normalization, got {config.normalization!r}"
            )
        residual = has_residual and getattr(config, "fused_residual_rmsnorm", False)
        if residual and config.normalization != "RMSNorm":
            raise ValueError("fused_residual_rmsnorm with has_residual=True is for normalization 'RMSNorm'")
        norm = layers[config.normalization](
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            rngs=nnx.Rngs(0) if rngs is None else rngs,
            **get_extra_te_kwargs(config),
        )
        norm.returns_residual = residual
        return norm
