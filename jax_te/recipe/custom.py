"""A recipe composed of quantizers of your choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax_te.recipe.base import Recipe, Support
from jax_te.recipe.format import Format


@dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """A quantizer for each tensor role, chosen by a function.

    A GEMM multiplies quantized operands if the quantizers of both are compatible; an operand without a quantizer makes
    its GEMMs run in the compute dtype, with the other operand's quantized values.

    Args:
        qfactory: ``qfactory(role) -> jax_te.quantize.Quantizer | None`` for the roles ``"x"`` (a linear layer's input),
            ``"kernel"`` and ``"grad"`` (the gradient of its output). None keeps that tensor in high precision. It is
            called while tracing and is part of the jit cache key: use a function defined once, not a new lambda each
            time. Quantizers that need state are refused; use `DelayedScaling` for those.
        override_linear_precision, fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see `Recipe`.
        fp8_dpa, fp8_mha: False; True is refused.

    Raises:
        TypeError: if ``qfactory`` is not callable or not hashable.
        ValueError: for an ``fp8_format``: the quantizers have their own; when used, if all roles have None.

    Source: ``transformer_engine.common.recipe.CustomRecipe``, whose roles are ``linear_input``, ``linear_weight``,
        ``linear_grad_output``.

    >>> import jax.numpy as jnp
    >>> from jax_te.quantize import BlockQuantizer, TensorQuantizer
    >>> def factory(role):
    ...     return TensorQuantizer(dtype=jnp.float8_e5m2) if role == "grad" else BlockQuantizer(dtype=jnp.float8_e4m3fn)
    >>> CustomRecipe(qfactory=factory).name
    'custom'
    """

    attention_lacks: ClassVar[str] = "quantizers for a linear layer's tensors only"

    qfactory: Callable[[str], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        # The base's default stands for "not given".
        if self.fp8_format is not Format.HYBRID:
            raise ValueError("CustomRecipe takes no fp8_format: give the quantizers that qfactory makes a dtype")
        # Compared and hashed at every call of a jitted function, so it must not contain arrays.
        try:
            hash(self.qfactory)
        except TypeError:
            raise TypeError(
                f"qfactory {self.qfactory!r} is not hashable, as a jit cache key must be; use a plain function"
            ) from None

    @property
    def name(self) -> str:
        return "custom"

    def _native(self, capability: float) -> Support:
        return Support(False, f"it depends on the quantizers; ask the recipe that has them (this is {capability:g})")
