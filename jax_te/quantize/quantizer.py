"""Quantizers: what a recipe does to each operand of a linear layer's GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import jax.numpy as jnp

from jax_te.errors import QuantizerStateError
from jax_te.quantize.scaling import AmaxState, amax, compute_scale, next_amax_state, scale_in_use
from jax_te.quantize.tensor import QuantizedTensor
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, fp8_max
from jax_te.typing import Array, DTypeLike

TensorRole = Literal["x", "kernel", "grad"]
ROLES: tuple[TensorRole, ...] = ("x", "kernel", "grad")
"""The operands of a linear layer's three GEMMs: its input, its kernel, the gradient of its output."""


class GemmState(TypedDict):
    """Delayed-scaling state of one linear layer, an `AmaxState` for each operand."""

    x: AmaxState
    kernel: AmaxState
    grad: AmaxState


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Static description of how one tensor is quantized. Hashable.

    Args:
        dtype: FP8 dtype of the result.
        scaling: ``"delayed"`` (the scale is given) or ``"current"`` (the scale is taken from the tensor).
    """

    dtype: DTypeLike
    scaling: Literal["delayed", "current"]

    def scale_for(self, x_amax: Array, scale: Array | None) -> Array:
        """The scale to quantize with: ``scale`` if delayed, from the tensor's amax if current."""
        if self.scaling == "delayed":
            assert scale is not None
            return scale
        return compute_scale(x_amax, self.dtype)


def quantize(x: Array, quantizer: Quantizer, scale: Array | None = None) -> tuple[QuantizedTensor, Array]:
    """Quantize an array: ``clip(x * scale)`` in fp32, rounded to nearest even.

    Args:
        x: fp32, bf16 or fp16 ``[...]``.
        quantizer: how.
        scale: fp32 ``[]``; needed for delayed scaling, unused otherwise.

    Returns:
        The quantized tensor, and the amax of ``x`` (fp32 ``[]``).

    >>> q, _ = quantize(jnp.array([[1.0, -2.0]]), Quantizer(dtype=jnp.float8_e4m3fn, scaling="current"))
    >>> float(q.data[0, 1]), float(q.scale_inv)
    (-448.0, 0.004464285913854837)
    """
    x_amax = amax(x)
    scale = quantizer.scale_for(x_amax, scale)
    limit = fp8_max(quantizer.dtype)
    data = jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(quantizer.dtype)
    return QuantizedTensor(data=data, scale_inv=1.0 / scale, dtype=x.dtype), x_amax


class GemmQuantizers:
    """The three quantizers of one linear layer under a recipe, with the scales its state holds.

    Args:
        recipe: None for no quantization; then ``self[role]`` is ``(None, None)``.
        state: the layer's state if ``recipe.has_state``.

    Raises:
        QuantizerStateError: if the recipe has state and none is given.
    """

    def __init__(self, recipe: Recipe | None, state: GemmState | None):
        self.recipe, self.state = recipe, state
        if recipe is not None and recipe.has_state and state is None:
            raise QuantizerStateError(
                f"{recipe} needs quantizer state and this layer has none. Build the model inside "
                "`with autocast(recipe):`, or attach state with prepare_quantization(model, recipe)."
            )

    def __getitem__(self, role: TensorRole) -> tuple[Quantizer | None, Array | None]:
        """The quantizer of an operand and the scale to pass with it (None under current scaling)."""
        recipe = self.recipe
        if recipe is None:
            return None, None
        dtype = recipe.fp8_format.bwd_dtype if role == "grad" else recipe.fp8_format.fwd_dtype
        if isinstance(recipe, DelayedScaling):
            assert self.state is not None
            scale = scale_in_use(self.state[role], dtype, recipe)
            return Quantizer(dtype=dtype, scaling="delayed"), scale
        if isinstance(recipe, Float8CurrentScaling):
            return Quantizer(dtype=dtype, scaling="current"), None
        raise TypeError(f"no quantizers for recipe {recipe!r}")

    def next_state(self, amaxes: dict[TensorRole, Array | None]) -> GemmState | None:
        """The state's next value, which is what its gradient must be; None for a recipe without state."""
        if self.state is None or not isinstance(self.recipe, DelayedScaling):
            return self.state
        return GemmState(**{role: next_amax_state(self.state[role], self[role][1], amaxes[role]) for role in ROLES})  # type: ignore
