"""The recipe that a configuration's precision fields stand for."""

from __future__ import annotations

from jax_te.config import PrecisionConfig
from jax_te.megatron.delayed import TEDelayedScaling
from jax_te.megatron.quant_recipe import resolve_factory
from jax_te.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

_FORMATS = {"e4m3": Format.E4M3, "hybrid": Format.HYBRID}


def recipe_from_config(config: PrecisionConfig) -> Recipe | None:
    """The recipe of a whole model; None without ``fp8`` and ``fp4``.

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
        return NVFP4BlockScaling()
    if config.fp8 is None:
        return None
    number_format, high_precision = _FORMATS[config.fp8], (False, False, not config.fp8_wgrad)
    if config.fp8_recipe == "delayed":
        return TEDelayedScaling(config, number_format, high_precision)
    if config.fp8_recipe == "custom":
        factory = resolve_factory(config.fp8_quantizer_factory)
        return CustomRecipe(qfactory=factory, override_linear_precision=high_precision)
    classes = {"tensorwise": Float8CurrentScaling, "blockwise": Float8BlockScaling, "mxfp8": MXFP8BlockScaling}
    return classes[config.fp8_recipe](fp8_format=number_format, override_linear_precision=high_precision)
