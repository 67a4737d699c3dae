"""Recipes from the precision fields of a configuration."""

from __future__ import annotations

import argparse
from typing import Any

from jax_te._validation import checked, log_hints
from jax_te.config import PrecisionConfig
from jax_te.megatron.quantization.te_recipe import FP8_FORMATS, FP8_RECIPES, resolve_factory
from jax_te.recipe import CustomRecipe, DelayedScaling, Format, NVFP4BlockScaling, Recipe

_DELAYED_DEFAULTS = {
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "tp_only_amax_red": False,
}


@checked
class TEDelayedScaling(DelayedScaling):
    """The model-wide delayed-scaling recipe of a Megatron configuration, equal to a `DelayedScaling` of its fields.

    Args:
        config: configuration, or Megatron-LM's arguments, whose ``fp8_margin`` (default 0), ``fp8_amax_history_len``
            (1), ``fp8_amax_compute_algo`` (``"most_recent"``), ``tp_only_amax_red`` (False) and
            ``fp8_dot_product_attention`` or ``fp8_multi_head_attention`` (False) are read. None: these defaults, which
            are Megatron's; those of `DelayedScaling` itself are Transformer Engine's.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        override_linear_precision: whether the forward GEMM, the input gradient's and the weight gradient's stay in high
            precision. Megatron passes ``(False, False, not config.fp8_wgrad)``, which Transformer Engine ignores, so
            its weight gradients are in FP8 nevertheless; here the argument has its effect.
        fields: fields of `DelayedScaling`, in place of the configuration's.

    Raises:
        ValueError: for values that `DelayedScaling` refuses.
        TypeError: for a format that is not a `Format`; for a configuration of another kind, and a namespace with none
            of the four names.

    Source: ``megatron.core.extensions.transformer_engine.TEDelayedScaling``.

    >>> TEDelayedScaling(argparse.Namespace(fp8_margin=2), Format.HYBRID).margin
    2
    """

    def __init__(
        self,
        config: PrecisionConfig | argparse.Namespace | None = None,
        fp8_format: Format = Format.HYBRID,
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        **fields: Any,
    ):
        # Megatron warns that Transformer Engine has ignored it since version 1.8: scales follow every step's amaxes.
        log_hints(fp8_interval=getattr(config, "fp8_interval", 1) != 1)
        if isinstance(config, argparse.Namespace) and not vars(config).keys() & _DELAYED_DEFAULTS.keys():
            raise TypeError(
                f"config must have fields of delayed scaling, {', '.join(_DELAYED_DEFAULTS)}, and this Namespace has "
                "none of them; give Megatron-LM's arguments, a TransformerConfig, or None for Megatron's defaults"
            )
        # By getattr: the arguments of older Megatron-LM lack some.
        of_config = {
            name.removeprefix("fp8_"): getattr(config, name, default) for name, default in _DELAYED_DEFAULTS.items()
        }
        # dataclasses.replace calls the class with all fields and no configuration.
        precision: Any = {"fp8_format": fp8_format, "override_linear_precision": override_linear_precision}
        super().__init__(**of_config | _attention_fields(config) | precision | fields)

    # A dataclass equals none of another class. As a jit cache key this recipe is that of its fields.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DelayedScaling) and vars(self) == vars(other)

    __hash__ = DelayedScaling.__hash__

    # As that recipe, whose defaults decide which fields the text leaves out.
    def __repr__(self) -> str:
        return repr(DelayedScaling(**vars(self)))


@checked
def recipe_from_config(config: PrecisionConfig) -> Recipe | None:
    """Return the recipe of a whole model; None without ``fp8`` and ``fp4``.

    Build and call the model inside of ``autocast(recipe_from_config(config))``. Megatron's transformer block opens such
    a context by itself.

    ``fp8_wgrad=False`` keeps weight gradients in high precision under every FP8 recipe.

    Raises:
        ValueError: for a quantizer factory that cannot be found.

    Source: ``megatron.core.fp8_utils.get_fp8_recipe``, ``megatron.core.fp4_utils.get_fp4_recipe``.

    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, fp8="hybrid")
    >>> recipe = recipe_from_config(config)
    >>> recipe.name, recipe.amax_history_len
    ('delayed', 1)
    """
    if config.fp4 is not None:
        if config.fp4_recipe == "custom":
            return CustomRecipe(qfactory=resolve_factory(config.fp4_quantizer_factory))
        # fp8_wgrad is a field of FP8: it has no effect here, as in Megatron.
        return NVFP4BlockScaling()
    if config.fp8 is None:
        return None
    # Order of the three GEMMs: forward, input gradient, weight gradient.
    number_format, high_precision = FP8_FORMATS[config.fp8], (False, False, not config.fp8_wgrad)
    if config.fp8_recipe == "delayed":
        # Apart from the others, because only this recipe has a history and a margin.
        return TEDelayedScaling(config, number_format, high_precision)
    if config.fp8_recipe == "custom":
        factory = resolve_factory(config.fp8_quantizer_factory)
        return CustomRecipe(qfactory=factory, override_linear_precision=high_precision)
    return FP8_RECIPES[config.fp8_recipe](
        fp8_format=number_format, override_linear_precision=high_precision, **_attention_fields(config)
    )


def _attention_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a recipe for FP8 attention, from a configuration's."""
    return {
        "fp8_dpa": getattr(config, "fp8_dot_product_attention", False),
        "fp8_mha": getattr(config, "fp8_multi_head_attention", False),
    }
