"""What a recipe does to the operands of a linear layer's GEMMs."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp

from jax_te.errors import QuantizerStateError
from jax_te.quantize.block import BlockQuantizer, MXQuantizer
from jax_te.quantize.nvfp4 import NVFP4Quantizer
from jax_te.quantize.quantizer import Quantizer, TensorQuantizer
from jax_te.quantize.scaling import AmaxState, next_amax_state, scale_in_use
from jax_te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from jax_te.typing import Array

TensorRole = Literal["x", "kernel", "grad"]
ROLES: tuple[TensorRole, ...] = ("x", "kernel", "grad")
"""The operands of a linear layer's three GEMMs: its input, its kernel, the gradient of its output."""


class GemmState(TypedDict):
    """Delayed-scaling state of one linear layer, an `AmaxState` for each operand."""

    x: AmaxState
    kernel: AmaxState
    grad: AmaxState


def quantizer_for(recipe: Recipe | None, role: TensorRole) -> Quantizer | None:
    """The quantizer of a tensor role under a recipe, or None for high precision.

    >>> quantizer_for(NVFP4BlockScaling(), "kernel").two_dimensional
    True
    """
    if recipe is None:
        return None
    dtype = recipe.fp8_format.bwd_dtype if role == "grad" else recipe.fp8_format.fwd_dtype
    if isinstance(recipe, DelayedScaling):
        return TensorQuantizer(dtype=dtype, scaling="delayed")
    if isinstance(recipe, Float8CurrentScaling):
        return TensorQuantizer(dtype=dtype, power_of_two=recipe.use_power_2_scales)
    if isinstance(recipe, Float8BlockScaling):
        return BlockQuantizer(dtype=dtype, two_dimensional=role == "kernel", power_of_two=not recipe.use_f32_scales)
    if isinstance(recipe, MXFP8BlockScaling):
        return MXQuantizer(dtype=dtype)
    if isinstance(recipe, NVFP4BlockScaling):
        return NVFP4Quantizer(
            two_dimensional=role == "kernel" and not recipe.disable_2d_quantization,
            hadamard=role != "kernel" and not recipe.disable_rht,
            stochastic_rounding=role == "grad" and not recipe.disable_stochastic_rounding,
        )
    if isinstance(recipe, CustomRecipe):
        return _custom(recipe, role)
    raise TypeError(f"no quantizers for recipe {recipe!r}")


def _custom(recipe: CustomRecipe, role: TensorRole) -> Quantizer | None:
    quantizer = recipe.qfactory(role)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"CustomRecipe's qfactory gave {quantizer!r} for role {role!r}; it must give one of jax_te.quantize's "
            "quantizers, or None for high precision"
        )
    if isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "delayed":
        raise ValueError(
            f"CustomRecipe's qfactory gave a delayed-scaling quantizer for role {role!r}, which needs state; use the "
            "DelayedScaling recipe, or scaling='current'"
        )
    return quantizer


class GemmQuantizers:
    """The three quantizers of one linear layer under a recipe, with the scales its state holds.

    Args:
        recipe: None for no quantization; then ``self[role]`` is ``(None, None)``.
        state: the layer's state if ``recipe.has_state``.

    Raises:
        QuantizerStateError: if the recipe has state and none is given.
    """

    def __init__(self, recipe: Recipe | None, state: GemmState | None):
        self.recipe = recipe
        self.dtype = None if state is None else state["x"]["scale"].dtype
        # A state in the dtype of `with_max_gradients` is an fp32 one to everybody but JAX's differentiation.
        self.state = None if state is None else _converted(state, jnp.float32)
        if recipe is not None and recipe.has_state and state is None:
            raise QuantizerStateError(
                f"{recipe} needs quantizer state and this layer has none. Build the model inside "
                "`with autocast(recipe):`, or attach state with prepare_quantization(model, recipe)."
            )

    def __getitem__(self, role: TensorRole) -> tuple[Quantizer | None, Array | None]:
        """The quantizer of an operand and the scale to pass with it (None except under delayed scaling)."""
        quantizer = quantizer_for(self.recipe, role)
        if not isinstance(self.recipe, DelayedScaling):
            return quantizer, None
        assert self.state is not None
        assert quantizer is not None
        return quantizer, scale_in_use(self.state[role], quantizer.dtype, self.recipe)

    def next_state(self, amaxes: dict[TensorRole, Array | None]) -> GemmState | None:
        """The state's next value, which is what its gradient must be; None for a recipe without state.

        An operand that nothing read quantized has no amax (None); its history takes a 0, which no scale follows.
        """
        if self.state is None:
            return None
        if not isinstance(self.recipe, DelayedScaling):
            return _converted(self.state, self.dtype)
        entries = {}
        for role in ROLES:
            scale, seen = self[role][1], amaxes[role]
            assert scale is not None
            entries[role] = next_amax_state(self.state[role], scale, jnp.zeros_like(scale) if seen is None else seen)
        return _converted(GemmState(**entries), self.dtype)  # type: ignore[typeddict-item]


def _converted(state: GemmState, dtype: Any) -> GemmState:
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, dtype), state)
