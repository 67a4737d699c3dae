"""Quantization of the operands of a linear layer's three GEMMs under a recipe."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import jax.numpy as jnp

from jax_te._validation import checked
from jax_te.errors import QuantizerStateError
from jax_te.quantize.block import BlockQuantizer, MXQuantizer
from jax_te.quantize.nvfp4 import NVFP4Quantizer
from jax_te.quantize.quantizer import Quantizer, TensorQuantizer
from jax_te.quantize.scaling import AmaxRule, AmaxState, amax_rule_of, next_amax_state, scale_in_use
from jax_te.recipe import (
    GEMMS,
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

Gemm = Literal["fprop", "dgrad", "wgrad"]
"""The forward GEMM, that of the input's gradient and that of the kernel's gradient."""

_ROW_TILE = 16
"""Least number of rows that a grouped GEMM multiplies by one kernel at once."""

_READERS: dict[TensorRole, tuple[Gemm, Gemm]] = {
    "x": ("fprop", "wgrad"),
    "kernel": ("fprop", "dgrad"),
    "grad": ("dgrad", "wgrad"),
}
"""The two GEMMs that read each operand."""


class GemmState(TypedDict):
    """Delayed-scaling state of one linear layer, an `AmaxState` for each operand."""

    x: AmaxState
    kernel: AmaxState
    grad: AmaxState


@dataclass(frozen=True, kw_only=True)
class OperandPrecision:
    """Quantization of one operand, and the form in which its two GEMMs read it.

    Args:
        quantizer: None: the operand is not quantized.
        read_quantized, read_unquantized: whether a GEMM reads it quantized, or as it is.
        one_scale: whether the operand has one scale (or none), so that shards quantized under one amax are the shards
            of the quantized tensor.
    """

    quantizer: Quantizer | None = None
    read_quantized: bool = True
    read_unquantized: bool = False
    one_scale: bool = True

    @property
    def whole_amax(self) -> bool:
        """Whether a current scale on a mesh covers the whole tensor, not only the shards that one GEMM reads."""
        return isinstance(self.quantizer, TensorQuantizer) and self.quantizer.amax_scope == "whole"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A recipe as ops read it: nothing below a public op sees a `Recipe`.

    Args:
        x, kernel, grad: the three operands.
        overridden: whether each of `GEMMS` multiplies its operands unquantized, in the compute dtype.
        split_accumulator: whether each of `GEMMS` promotes partial sums to fp32 on the way.
        amax_rule: amax rule of delayed scaling; None for recipes without state.
        alignment: divisor that the sizes of quantized matrices must have.
        shard_multiple: sizes of shards likewise, for devices to quantize theirs by themselves; None: they cannot.
        recipe_name: recipe's name, for messages.
    """

    x: OperandPrecision = OperandPrecision()
    kernel: OperandPrecision = OperandPrecision()
    grad: OperandPrecision = OperandPrecision()
    overridden: tuple[bool, bool, bool] = (False, False, False)
    split_accumulator: tuple[bool, bool, bool] = (False, False, False)
    amax_rule: AmaxRule | None = None
    alignment: int = 1
    shard_multiple: int | None = 1
    recipe_name: str | None = None

    def of(self, role: TensorRole) -> OperandPrecision:
        """Return the precision of an operand."""
        return {"x": self.x, "kernel": self.kernel, "grad": self.grad}[role]

    def runs_unquantized(self, gemm: Gemm) -> bool:
        """Return whether a GEMM multiplies its operands unquantized, even if the recipe quantizes them for others."""
        return self.overridden[GEMMS.index(gemm)]

    def splits_accumulator(self, gemm: Gemm) -> bool:
        """Return whether a GEMM promotes partial sums to fp32 on the way."""
        return self.split_accumulator[GEMMS.index(gemm)]

    @property
    def quantizers(self) -> tuple[Quantizer | None, Quantizer | None, Quantizer | None]:
        """Quantizers of the three operands."""
        return self.x.quantizer, self.kernel.quantizer, self.grad.quantizer

    @property
    def group_alignment(self) -> int:
        """Alignment of groups of rows in one array with which no two groups share a block or a tile of a GEMM."""
        blocks = [quantizer.shard_multiple or 1 for quantizer in self.quantizers if quantizer is not None]
        return math.lcm(_ROW_TILE, self.alignment, *blocks)

    def misfit(self, label: str, name: str, size: int, shapes: str) -> ValueError:
        """Return the error of a size that is not a multiple of ``alignment``.

        Args:
            label: name of the op or layer.
            name, size: name and value of the size.
            shapes: shapes of its arrays, as text.
        """
        return ValueError(
            f"{label} under recipe {self.recipe_name!r}: {name} {size} must be a multiple of {self.alignment} (the "
            f"next is {size + -size % self.alignment}); {shapes}. Change the size, run this layer inside "
            "`with autocast(None):`, or, if the recipe is its own (a rule, module_recipe), give it None instead"
        )

    def split_misfit(self, tokens: Any, kernel: Any) -> str | None:
        """Return the reason why quantizing shards differs from quantizing the whole tensor, or None.

        Args:
            tokens: shape of one device's rows.
            kernel: shape of one device's part of a kernel.
        """
        multiple = self.shard_multiple
        if multiple is None:
            return f"recipe {self.recipe_name!r} has scales of the whole tensor in addition to those of its blocks"
        sizes = {"tokens in a row": tokens[-1] if tokens else 1, "input size": kernel[0], "output size": kernel[-1]}
        for name, size in sizes.items():
            if size % multiple:
                return f"{name} of one device, {size}, is not a multiple of the {multiple} values of a scale"
        return None

    def scale(self, state: GemmState | None, role: TensorRole) -> Array | None:
        """Return the scale that an operand's next use quantizes with; None except under delayed scaling."""
        if self.amax_rule is None:
            return None
        quantizer = self.of(role).quantizer
        assert state is not None
        assert isinstance(quantizer, TensorQuantizer)  # delayed scaling has no other
        return scale_in_use(state[role], quantizer.dtype, self.amax_rule)

    def next_state(
        self, state: GemmState | None, used: dict[TensorRole, tuple[Array | None, Array | None]]
    ) -> GemmState | None:
        """Return the state's next value, which is what its gradient must be; None without state.

        Args:
            state: fp32.
            used: scale in use and amax that was seen, for each role. If no GEMM read the operand quantized, its amax is
                None and 0 is pushed to its history; zeros do not affect the scale.
        """
        if state is None or self.amax_rule is None:
            return state
        entries = {}
        for role in ROLES:
            scale, seen = used[role]
            assert scale is not None
            entries[role] = next_amax_state(state[role], scale, jnp.zeros_like(scale) if seen is None else seen)
        return GemmState(**entries)  # type: ignore[typeddict-item]


def check_state(state: GemmState | None, recipe: DelayedScaling) -> None:
    """Raise QuantizerStateError unless there is state for ``recipe``, with histories of its length."""
    if state is None:
        raise QuantizerStateError(
            f"recipe {recipe.name!r} needs quantizer state, and this layer has none. Build the model inside "
            "`with autocast(recipe):`, or attach state with prepare_quantization(model, recipe)."
        )
    slots = state["kernel"]["amax_history"].shape[-1]
    if slots != recipe.amax_history_len:
        raise QuantizerStateError(
            f"the quantizer state has amax histories of {slots}, and recipe {recipe.name!r} needs "
            f"{recipe.amax_history_len}. Call under the recipe of the state, or make new state: "
            "prepare_quantization(model, recipe), change_recipe"
        )


# Cached, because every call of every layer needs it, and a model has few recipes; a recipe is hashable data.
@functools.lru_cache(maxsize=512)
def precision_of(recipe: Recipe | None) -> Precision:
    """Return a recipe as ops read it.

    >>> precision_of(Float8CurrentScaling()).alignment
    16
    """
    if recipe is None:
        return Precision()
    overridden = dict(zip(GEMMS, recipe.override_linear_precision, strict=True))
    operands = {}
    for role, readers in _READERS.items():
        quantizer = quantizer_for(recipe, role)
        unquantized = [overridden[gemm] for gemm in readers]
        operands[role] = OperandPrecision(
            quantizer=quantizer,
            read_quantized=not all(unquantized),
            read_unquantized=any(unquantized),
            one_scale=quantizer is None or isinstance(quantizer, TensorQuantizer),
        )
    quantizers = [operand.quantizer for operand in operands.values() if operand.quantizer is not None]
    if isinstance(recipe, CustomRecipe) and not quantizers:
        roles = ", ".join(map(repr, _READERS))
        raise ValueError(
            f"CustomRecipe's qfactory gave None for each of the roles {roles}, so that nothing would be quantized: "
            "they are Transformer Engine's linear_input, linear_weight and linear_grad_output. Give a quantizer for "
            "one of them, or autocast(None) for high precision"
        )
    multiples = [quantizer.shard_multiple for quantizer in quantizers]
    delayed = isinstance(recipe, DelayedScaling)
    return Precision(
        **operands,
        overridden=recipe.override_linear_precision,
        split_accumulator=tuple(getattr(recipe, f"fp8_gemm_{gemm}").use_split_accumulator for gemm in GEMMS),  # type: ignore[arg-type]
        amax_rule=amax_rule_of(recipe) if delayed else None,
        # The least common multiple: the largest of 48 and 32 satisfies one of them.
        alignment=math.lcm(*(quantizer.alignment for quantizer in quantizers)),
        shard_multiple=None if None in multiples else math.lcm(*multiples),  # type: ignore[arg-type]
        recipe_name=recipe.name,
    )


@checked
def quantizer_for(recipe: Recipe | None, role: TensorRole) -> Quantizer | None:
    """Return the quantizer of a tensor role under a recipe, or None for high precision.

    >>> quantizer_for(NVFP4BlockScaling(), "kernel").two_dimensional
    True
    """
    if recipe is None:
        return None
    dtype = recipe.fp8_format.bwd_dtype if role == "grad" else recipe.fp8_format.fwd_dtype
    if isinstance(recipe, DelayedScaling):
        return TensorQuantizer(dtype=dtype, scaling="given")
    if isinstance(recipe, Float8CurrentScaling):
        return TensorQuantizer(dtype=dtype, power_of_two=recipe.use_power_2_scales, amax_scope=recipe.amax_scope)
    if isinstance(recipe, Float8BlockScaling):
        # Kernels in squares, so that both GEMMs that read a kernel read the same values.
        return BlockQuantizer(dtype=dtype, two_dimensional=role == "kernel", power_of_two=not recipe.use_f32_scales)
    if isinstance(recipe, MXFP8BlockScaling):
        return MXQuantizer(dtype=dtype)
    if isinstance(recipe, NVFP4BlockScaling):
        # As in NVIDIA's recipe for training in NVFP4: squares for kernels, so that forward and backward read the same
        # values; stochastic rounding for gradients, whose rounding to nearest would be biased.
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
    if isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "given":
        raise ValueError(
            f"CustomRecipe's qfactory gave a quantizer with scaling='given' for role {role!r}, whose scale needs "
            "state; use the DelayedScaling recipe, or scaling='current'"
        )
    return quantizer
