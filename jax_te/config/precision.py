"""The precision of a whole model, with Megatron's field names."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from jax_te._validation import check_annotations, check_positive, log_once

# Megatron's defaults, which are not those of TE: a history of one step.
_DELAYED_ONLY = {
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "tp_only_amax_red": False,
}

_WITH_ATTENTION = ("delayed", "tensorwise")
"""Recipes under which attention can run in FP8."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The recipe of a whole model; `TransformerConfig` has these fields, too.

    They select a recipe; `jax_te.megatron.recipe_from_config` returns it, and layers run under it inside of
    ``autocast(recipe)``, as Megatron's do inside of the context that its transformer block opens. Only
    ``first_last_layers_bf16`` and ``fp8_output_proj`` determine where it applies.

    Args:
        fp8: ``"e4m3"``, ``"hybrid"`` (E5M2 for gradients) or None: no FP8; the other ``fp8_`` fields then say nothing.
        fp8_recipe: ``"delayed"``, ``"tensorwise"``, ``"blockwise"``, ``"mxfp8"`` or ``"custom"``.
        fp8_param, fp4_param: whether to store kernels quantized: `create_train_state` does, for a model with this
            configuration. Layers are always built with exact kernels, because masters are taken from those.
        fp8_quantizer_factory, fp4_quantizer_factory: dotted path of a ``"custom"`` recipe's ``qfactory``.
        fp8_margin, fp8_amax_history_len, fp8_amax_compute_algo, tp_only_amax_red: options of delayed scaling, see
            `jax_te.recipe.DelayedScaling`; the defaults are Megatron's. No effect under another recipe.
        fp8_wgrad: whether to quantize weight gradients' GEMMs. False: they run in high precision. Megatron's option has
            no effect; here it has, and for every recipe of FP8.
        fp8_output_proj: whether the models' output head follows the ambient recipe, too, whichever that is; in Megatron
            only MXFP8. False: it stays in the compute dtype.
        fp8_dot_product_attention: whether attention runs in FP8, too, under ``"delayed"`` and ``"tensorwise"``.
        fp8_multi_head_attention: the same.
        fp4: ``"e2m1"`` or None.
        fp4_recipe: ``"nvfp4"`` or ``"custom"``.
        first_last_layers_bf16: whether to keep the first and last layers in high precision, whatever the ambient recipe
            is.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: number of such layers, if ``first_last_layers_bf16``;
            each in [0, ``num_layers``].

    Raises:
        ValueError: for an unknown name; fp8 and fp4 together; ``fp8_param`` without fp8 and ``fp4_param`` without fp4;
            a custom recipe without its factory, and a factory without it; FP8 attention under another recipe of FP8;
            ``first_last_layers_bf16`` with fp8 and delayed scaling.
        TypeError: for a flag that is not bool.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> PrecisionConfig(fp8="hybrid").fp8_recipe
    'delayed'
    """

    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = "delayed"
    fp8_param: bool = False
    fp8_quantizer_factory: str | None = None
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    fp8_wgrad: bool = True
    fp8_output_proj: bool = False
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    tp_only_amax_red: bool = False
    fp4: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4", "custom"] = "nvfp4"
    fp4_param: bool = False
    fp4_quantizer_factory: str | None = None
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1

    def __post_init__(self) -> None:
        check_annotations(self, PrecisionConfig)
        check_positive(fp8_amax_history_len=self.fp8_amax_history_len)
        if self.fp8_margin < 0:
            raise ValueError(f"fp8_margin must be an integer >= 0, got {self.fp8_margin!r}")
        if self.fp8 is not None and self.fp4 is not None:
            raise ValueError(f"fp8={self.fp8!r} and fp4={self.fp4!r} are both given; give one of them")
        for kind in ("fp8", "fp4"):
            self._check_kind(kind)
        if self.fp8 is not None and self.fp8_recipe not in _WITH_ATTENTION:
            for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}=True is for fp8_recipe {' and '.join(map(repr, _WITH_ATTENTION))}, and fp8_recipe is "
                        f"{self.fp8_recipe!r}; set it to False, and attention stays in the compute dtype"
                    )
        # As in Megatron, whose launch scripts set these fields for every recipe.
        if self.fp8 is not None and self.fp8_recipe != "delayed":
            for name, default in _DELAYED_ONLY.items():
                if getattr(self, name) != default:
                    log_once(
                        f"{name} is for fp8_recipe 'delayed', and has no effect under {self.fp8_recipe!r}", logging.INFO
                    )
        if self.fp8 is not None and self.fp8_recipe == "delayed" and self.first_last_layers_bf16:
            raise ValueError(
                "first_last_layers_bf16 does not go with fp8_recipe 'delayed', as in Megatron; take another one. Or "
                "leave fp8 None and build and call the model inside of autocast(DelayedScaling()), which respects it"
            )

    def _check_kind(self, kind: str) -> None:
        on, factory = getattr(self, kind) is not None, getattr(self, f"{kind}_quantizer_factory")
        custom = on and getattr(self, f"{kind}_recipe") == "custom"
        if getattr(self, f"{kind}_param") and not on:
            raise ValueError(f"{kind}_param=True holds kernels as {kind} quantizes them, and {kind} is None; set it")
        if custom and not factory:
            raise ValueError(
                f"{kind}_recipe 'custom' needs {kind}_quantizer_factory, the dotted path of its factory, "
                "e.g. 'my_package.recipes.make_quantizer'"
            )
        # Without fp8 or fp4 the factory has no effect, like their other fields.
        if on and factory and not custom:
            raise ValueError(f"{kind}_quantizer_factory={factory!r} has no effect, because {kind}_recipe is not custom")
