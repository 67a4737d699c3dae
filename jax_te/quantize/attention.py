"""Quantization of the tensors of dot-product attention under a recipe, and the state of its scales."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp

from jax_te.errors import QuantizerStateError
from jax_te.quantize.quantizer import TensorQuantizer
from jax_te.quantize.scaling import (
    AmaxRule,
    AmaxState,
    amax,
    amax_rule_of,
    compute_scale,
    next_amax_state,
    power_of_two_scale,
    scale_in_use,
)
from jax_te.quantize.tensor import QuantizedTensor
from jax_te.recipe import AmaxScope, DelayedScaling, Float8CurrentScaling, Recipe
from jax_te.typing import Array, DTypeLike

AttentionTensor = Literal["q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv"]
"""A tensor that FP8 attention quantizes: queries, keys, values; the softmax ``s`` and the output; the output's
gradient, that of the scaled scores, ``dp``, and those of queries, keys and values. The names are cuDNN's."""

AttentionState = dict[str, AmaxState]
"""State of FP8 attention, a scale and an amax history for each role of `AttentionPrecision.roles`."""


@dataclass(frozen=True, kw_only=True)
class AttentionPrecision:
    """A recipe with ``fp8_dpa`` as attention reads it.

    All tensors have one FP8 dtype, `dtype`: XLA's binding of cuDNN has no E5M2 gradients beside E4M3 operands, and
    other backends compute the same numbers.

    Args:
        quantized_forward, quantized_backward: whether a pass is quantized. False: it runs in the compute dtype.
        delayed: whether all scales but that of ``s`` in forward are in the state. False: those of queries, keys, values
            and the output's gradient are current, and those of ``s`` and ``o`` follow from bounds.
        history_length: length of the state's amax histories.
        amax_rule: computation of a scale from a history.
        power_of_two: whether scales that are not delayed are rounded down to powers of two.
        amax_scope: scope of current scales on a mesh.
        by_parts: whether the recipe asks for a scale of each part of the batch.
        recipe_name: recipe's name, for messages.
    """

    dtype: ClassVar[DTypeLike] = jnp.float8_e4m3fn

    quantized_forward: bool
    quantized_backward: bool
    delayed: bool
    history_length: int
    amax_rule: AmaxRule
    power_of_two: bool = False
    amax_scope: AmaxScope = "group"
    by_parts: bool = False
    recipe_name: str

    @property
    def unquantized_pass(self) -> str | None:
        """The field of the recipe that keeps a pass in the compute dtype, or None."""
        if not self.quantized_forward:
            return "fp8_dpa_fwd"
        return None if self.quantized_backward else "fp8_dpa_bwd"

    @property
    def roles(self) -> dict[str, tuple[AttentionTensor, ...]]:
        """The entries of the state, and the tensors whose scale each is."""
        roles: dict[str, tuple[AttentionTensor, ...]] = {}
        if self.delayed:
            # Transformer Engine's six quantizers.
            roles["qkv"] = ("q", "k", "v")
            if self.quantized_forward:
                roles |= {"s": ("s",), "o": ("o",)}
            if self.quantized_backward:
                roles |= {"do": ("do",), "dp": ("dp",), "dqkv": ("dq", "dk", "dv")}
        elif self.quantized_backward:
            # Of these no scale can be known before the kernel writes them.
            roles |= {"dp": ("dp",), "dq": ("dq",), "dk": ("dk",), "dv": ("dv",)}
        return roles

    def quantize(self, x: Array, scale: Array) -> QuantizedTensor:
        """Return a tensor quantized under a scale."""
        quantizer = TensorQuantizer(dtype=self.dtype, scaling="given")
        return quantizer.quantize(x, scale, axis=-1, columnwise=False)[0]

    def scale_of_amax(self, largest: Array) -> Array:
        """Return the scale of a tensor whose values are at most ``largest``, fp32 ``[]``."""
        return (power_of_two_scale if self.power_of_two else compute_scale)(largest, self.dtype)

    def state_scales(self, state: AttentionState | None) -> dict[AttentionTensor, Array]:
        """Return the scales that the state gives, fp32 ``[]``, by tensor."""
        scales = {}
        for role, tensors in self.roles.items():
            assert state is not None
            scales |= dict.fromkeys(tensors, self._scale_in_use(state[role]))
        return scales

    def _scale_in_use(self, state: AmaxState) -> Array:
        scale = scale_in_use(state, self.dtype, self.amax_rule)
        if not self.power_of_two:
            return scale
        newest = state["amax_history"][..., 0]
        # Where there is no amax yet, the scale in use is the old one, which is a power of two.
        known = (newest >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(newest)
        return jnp.where(known, self.scale_of_amax(newest), scale)

    def next_state(
        self,
        state: AttentionState | None,
        scales: dict[AttentionTensor, Array],
        amaxes: dict[AttentionTensor, Array],
    ) -> AttentionState | None:
        """Return the state's next value, which is what its gradient must be; None without state.

        Args:
            state: fp32.
            scales: scale that each tensor was quantized with, fp32 ``[]``.
            amaxes: largest absolute value of each tensor before quantization, fp32 ``[]``.
        """
        if state is None:
            return None
        return {
            role: next_amax_state(state[role], scales[tensors[0]], amax(jnp.stack([amaxes[t] for t in tensors])))
            for role, tensors in self.roles.items()
        }

    def check_state(self, state: AttentionState | None) -> None:
        """Raise QuantizerStateError unless there is state for the recipe, with histories of its length."""
        if not self.roles:
            return
        if state is None:
            raise QuantizerStateError(
                f"recipe {self.recipe_name!r} with fp8_dpa=True needs quantizer state, and this attention has none. "
                "Build the model inside `with autocast(recipe):`, or attach state with "
                "prepare_quantization(model, recipe)."
            )
        found = {role: entry["amax_history"].shape[-1] for role, entry in state.items()}
        if found != dict.fromkeys(self.roles, self.history_length):
            raise QuantizerStateError(
                f"the quantizer state of this attention has amax histories {found}, and recipe {self.recipe_name!r} "
                f"needs {dict.fromkeys(self.roles, self.history_length)}. Call under the recipe of the state, or make "
                "new state: prepare_quantization(model, recipe), change_recipe"
            )


# Cached as `precision_of` is.
@functools.lru_cache(maxsize=512)
def attention_precision_of(recipe: Recipe | None) -> AttentionPrecision | None:
    """Return a recipe as attention reads it; None for attention in the compute dtype.

    >>> list(attention_precision_of(DelayedScaling(fp8_dpa=True)).roles)
    ['qkv', 's', 'o', 'do', 'dp', 'dqkv']
    """
    if not isinstance(recipe, DelayedScaling | Float8CurrentScaling) or not recipe.quantizes_attention:
        return None
    if isinstance(recipe, DelayedScaling):
        return AttentionPrecision(
            quantized_forward=recipe.fp8_dpa_fwd,
            quantized_backward=recipe.fp8_dpa_bwd,
            delayed=True,
            history_length=recipe.amax_history_len,
            amax_rule=amax_rule_of(recipe),
            by_parts=recipe.tp_only_amax_red,
            recipe_name=recipe.name,
        )
    return AttentionPrecision(
        quantized_forward=recipe.fp8_dpa_fwd,
        quantized_backward=recipe.fp8_dpa_bwd,
        delayed=False,
        history_length=1,
        amax_rule=AmaxRule(0, "most_recent"),
        power_of_two=recipe.use_power_2_scales,
        amax_scope=recipe.amax_scope,
        recipe_name=recipe.name,
    )
