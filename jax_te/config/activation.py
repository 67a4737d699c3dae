"""Activation functions by name."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "gelu": ("gelu",),
    "geglu": ("gelu", "linear"),
    "qgelu": ("quick_gelu",),
    "qgeglu": ("quick_gelu", "linear"),
    "relu": ("relu",),
    "reglu": ("relu", "linear"),
    "srelu": ("squared_relu",),
    "sreglu": ("squared_relu", "linear"),
    "silu": ("silu",),
    "swiglu": ("silu", "linear"),
    "glu": ("sigmoid", "linear"),
    "clamped_swiglu": ("clamped_silu", "clamped_linear"),
}
"""Transformer Engine's activation names and the functions applied to each component of the first MLP projection."""


@dataclass(frozen=True, kw_only=True)
class ActivationParams:
    """The numbers in ``clamped_swiglu``, the one activation that has any.

    With ``a = min(x0, limit)`` and ``b = clip(x1, -limit, limit)`` it is
    ``a * sigmoid(alpha * a) * (b + linear_offset)``.

    Args:
        limit: > 0.
        alpha: slope of the sigmoid; 1.702 makes the first factor an approximation of GELU.
        linear_offset: added to the second component.

    Raises:
        ValueError: for a limit that is not positive.

    Source: ``transformer_engine.jax.cpp_extensions.activation.ClampedSwigluParams``; the GPT-OSS models.

    >>> ActivationParams(limit=5.0)
    ActivationParams(limit=5.0, alpha=1.702, linear_offset=1.0)
    """

    limit: float = 7.0
    alpha: float = 1.702
    linear_offset: float = 1.0

    def __post_init__(self) -> None:
        if not self.limit > 0.0:
            raise ValueError(f"limit must be > 0, got {self.limit!r}")
