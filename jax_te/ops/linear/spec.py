"""Static descriptions that ops and backends share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_te.config import ACTIVATIONS, ActivationParams


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Which normalization over the last axis.

    Args:
        kind: ``"layernorm"`` (subtract the mean, divide by the standard deviation, scale, add bias) or ``"rmsnorm"``
            (divide by the root mean square, scale; no bias).
        epsilon: added to the variance or mean square.
        zero_centered_gamma: the stored scale is an offset from 1.

    >>> NormSpec(kind="rmsnorm").epsilon
    1e-05
    """

    kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    epsilon: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("layernorm", "rmsnorm"):
            raise ValueError(f"kind must be 'layernorm' or 'rmsnorm', got {self.kind!r}")
        if not self.epsilon > 0.0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon!r}")


def activation_parts(name: str) -> tuple[str, ...]:
    """Functions applied to each component of the pre-activation; the results are multiplied.

    >>> activation_parts("swiglu")
    ('silu', 'linear')
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def check_activation_params(name: str, params: ActivationParams | None) -> None:
    """Raise ValueError for an unknown activation, or for parameters that it does not have.

    >>> check_activation_params("clamped_swiglu", ActivationParams(limit=5.0))
    """
    if activation_parts(name) != ACTIVATIONS["clamped_swiglu"] and params is not None:
        raise ValueError(f"activation {name!r} has no parameters, got {params}; only 'clamped_swiglu' has")
