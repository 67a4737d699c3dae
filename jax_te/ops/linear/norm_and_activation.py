"""The norm before a linear layer, and the activation function after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax_te._validation import check_annotations
from jax_te.config import ACTIVATIONS, ActivationLike, ActivationParams, activation_parts


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Kind of normalization over the last axis.

    Args:
        kind: ``"layernorm"`` (subtract the mean, divide by the standard deviation, scale, add bias) or ``"rmsnorm"``
            (divide by the root mean square, scale; no bias).
        epsilon: constant added to the variance or mean square.
        zero_centered_gamma: whether the stored scale is an offset from 1.

    >>> NormSpec(kind="rmsnorm").epsilon
    1e-05
    """

    kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    epsilon: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, NormSpec)
        if not self.epsilon > 0.0:
            raise ValueError(f"the norm's epsilon must be > 0, got {self.epsilon!r}")


class Activation(NamedTuple):
    """An activation function or its name, see `jax_te.ops.activation`, and parameters of ``"clamped_swiglu"``.

    >>> Activation("swiglu").parts()
    ('silu', 'linear')
    """

    name: ActivationLike
    params: ActivationParams | None = None

    def parts(self) -> tuple[Any, ...]:
        """Return the functions applied to each component of the pre-activation; the results are multiplied.

        Raises:
            ValueError: for an unknown activation, or for parameters that it does not have.
            TypeError: for a value that is neither a name nor a function.
        """
        parts = activation_parts(self.name)
        if self.params is not None and parts != ACTIVATIONS["clamped_swiglu"]:
            raise ValueError(f"{self.name!r} has no parameters, got {self.params}; only 'clamped_swiglu' has")
        return parts
