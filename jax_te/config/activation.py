"""Activation functions by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax_te._validation import check_annotations

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
    "gelu_exact": ("gelu_exact",),
}
"""Names of activations, which are Transformer Engine's and ``gelu_exact``, and the functions that each applies to the
components of the first MLP projection."""


@dataclass(frozen=True)
class LimitedFunction:
    """A function of one component, ``function(min(max(x, low), high)) + offset``.

    Args:
        function: name of a function in `ACTIVATIONS`, or a function of one array.
        low, high: limits of its argument, where its slope is still 1. None: no limit.
        offset: constant added to its value.

    Raises:
        ValueError: for an unknown function, a limit that is not a finite number, or limits in another order.
        TypeError: for what is neither a name nor a function that can be hashed.

    Source: ``activation_func_clamp_value`` and ``glu_linear_offset`` of
    ``megatron.core.transformer.TransformerConfig``; the GPT-OSS models.

    >>> (LimitedFunction("quick_gelu", high=7.0), LimitedFunction("linear", -7.0, 7.0, offset=1.0))[1].offset
    1.0
    """

    function: Any
    low: float | None = None
    high: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_annotations(self, LimitedFunction)
        activation_parts((self.function,), "function")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low!r} and {self.high!r}")


ActivationLike: TypeAlias = (
    str | Callable[..., Any] | LimitedFunction | tuple[str | Callable[..., Any] | LimitedFunction, ...]
)
"""A key of `ACTIVATIONS`; a function of one array, elementwise; or, as in te.jax, a function for each component, by
name or itself."""


def activation_parts(activation: ActivationLike, name: str = "activation") -> tuple[Any, ...]:
    """Return the functions applied to each component, by name where they have one.

    ``jax.nn.gelu``, ``relu``, ``sigmoid`` and ``silu`` have, so that Transformer Engine's kernels run for them.

    Args:
        activation: a name, a function, or a tuple of them.
        name: argument's name, for the message.

    Raises:
        ValueError: for an unknown name, or no function at all.
        TypeError: for what is neither a name nor a function that can be hashed: ``jax.jit`` compiles once for each.

    >>> activation_parts("swiglu"), activation_parts(("gelu_exact", "linear"))
    (('silu', 'linear'), ('gelu_exact', 'linear'))
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; allowed: {', '.join(ACTIVATIONS)}, or a function")
        return ACTIVATIONS[activation]
    parts = activation if isinstance(activation, tuple) else (activation,)
    known = sorted({part for parts in ACTIVATIONS.values() for part in parts})
    if not parts or any(isinstance(part, str) and part not in known for part in parts):
        raise ValueError(f"unknown function in {name} {activation!r}; allowed: {', '.join(known)}, or functions")
    for part in parts:
        if isinstance(part, LimitedFunction):
            activation_parts((part.function,), name)
    named = (str, LimitedFunction)
    if not all(isinstance(part, named) or (callable(part) and type(part).__hash__) for part in parts):
        raise TypeError(f"{name} must be a name, a function that can be hashed, or a tuple of them: {activation!r}")
    # Looked up, not imported: a configuration does not need JAX, and whoever has these functions has imported it.
    nn = sys.modules.get("jax.nn")
    names = {getattr(nn, name): name for name in ("gelu", "relu", "sigmoid", "silu")} if nn else {}
    return tuple(part if isinstance(part, named) else names.get(part, part) for part in parts)


def named_activation(parts: tuple[Any, ...]) -> ActivationLike:
    """Return the key of `ACTIVATIONS` for functions of the components, or the functions if there is none.

    >>> named_activation(("gelu", "linear"))
    'geglu'
    """
    return next((name for name, known in ACTIVATIONS.items() if known == parts), parts)


@dataclass(frozen=True, kw_only=True)
class ActivationParams:
    """The parameters of ``clamped_swiglu``, the only activation that has any.

    With ``a = min(x0, limit)`` and ``b = clip(x1, -limit, limit)`` it is
    ``a * sigmoid(alpha * a) * (b + linear_offset)``.

    Args:
        limit: limit of the components, > 0.
        alpha: slope of the sigmoid; 1.702 makes the first factor an approximation of GELU.
        linear_offset: constant added to the second component.

    Raises:
        ValueError: for a limit that is not positive, or not a finite number.

    Source: ``transformer_engine.jax.cpp_extensions.activation.ClampedSwigluParams``; the GPT-OSS models.

    >>> ActivationParams(limit=5.0)
    ActivationParams(limit=5.0, alpha=1.702, linear_offset=1.0)
    """

    limit: float = 7.0
    alpha: float = 1.702
    linear_offset: float = 1.0

    def __post_init__(self) -> None:
        check_annotations(self, ActivationParams)
        if not self.limit > 0.0:
            raise ValueError(f"limit must be > 0, got {self.limit!r}")
